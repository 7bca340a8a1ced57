"""Products with quantized weights, which stay codes and scales in memory."""
