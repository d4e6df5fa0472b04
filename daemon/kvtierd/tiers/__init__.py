"""The tiers that hold bytes: device and host in memory, the disk in a directory, and remote stores."""
