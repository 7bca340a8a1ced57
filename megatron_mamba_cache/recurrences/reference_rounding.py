from .quantized_states import QuantizedStates, store_quantized_ref


def store_rounded_ref(values, scales, slots, states):
    store_quantized_ref(QuantizedStates(values, scales), slots, states)
