"""Memory mapped in this process: slots of the tiers, and the GPUs that can address them."""
