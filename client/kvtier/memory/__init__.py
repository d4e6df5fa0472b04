"""Memory that is mapped here: slots of the tiers, and the GPUs that can address them."""
