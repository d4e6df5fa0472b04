"""A store beyond this host: what is known of it, what is fetched from it, what goes there."""
