"""The servicers: a class for each gRPC service of ``proto/kvtier/v1``."""
