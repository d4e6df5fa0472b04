"""kvtier's events, republished in the forms that other projects' routers read."""
