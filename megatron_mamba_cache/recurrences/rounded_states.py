from .quantized_states import (  # noqa
    _LEAST as LEAST_SCALE, _MOST_INT8 as MOST_VALUE, QuantizedStates as RoundedStates,
    quantized_places as rounded_places, store_quantized as store_rounded,
)
