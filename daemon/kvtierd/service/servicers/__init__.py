"""One class per gRPC service of ``proto/kvtier/v1``."""
