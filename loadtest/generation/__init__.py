"""How fast text comes: the bare step loop, the engine on top of it, the service on top of that; and whether a token's price stays flat."""
