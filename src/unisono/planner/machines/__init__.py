"""What a plan runs on: devices, links, the order of axes on them; a measured host; different devices together."""
