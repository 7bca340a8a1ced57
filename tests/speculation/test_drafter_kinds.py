"""Protocols of drafters apply only to drafters that name their methods and attributes."""

from megatron_mamba_cache.speculation.drafter import UsesModelMemory


def test_a_drafter_with_a_chain_of_its_own_does_not_use_the_memory_of_the_model() -> None:
    class MarkovDrafter:
        chain = ("a", "b")

    assert not isinstance(MarkovDrafter(), UsesModelMemory)
