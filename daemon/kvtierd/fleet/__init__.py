"""The daemon as a client of other daemons: mirrors and reads of their blocks. Imported only if peers are configured."""
