"""Recurrent layers: their interface, and their states on the device (pool, copies between slots, cached forms)."""
