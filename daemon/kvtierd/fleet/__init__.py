"""The daemon as a client of other daemons: what they hold, and their blocks. Imported only where there are peers."""
