"""The help texts of the cache's counters in `/metrics`."""

COUNTER_TEXTS = {
    "requests_admitted": "Times that a request was given a row of the batch, again after an eviction included",
    "prompt_tokens_matched": "Prompt tokens whose KV was found in the cache, with a state to resume from or not",
    "prompt_tokens_skipped": "Prompt tokens that were not computed because a cached state was restored",
    "prefill_tokens_computed": "Prompt tokens that were computed, those computed again after an eviction included",
    "decode_tokens_computed": "Tokens computed by decode steps, drafts included",
    "decode_rows": "Rows of all decode steps, one for each request and step",
    "draft_tokens": "Draft tokens that were verified",
    "accepted_tokens": "Draft tokens that were kept",
    "drafting_failures": "Steps that went on without drafts because the drafter failed",
    "states_reserved": "State slots that were reserved for a boundary before a step",
    "states_published": "States of prompts and replies that became findable in the cache",
    "decode_states_published": "Of the published states, those at a boundary inside a reply",
    "states_restored": "Cached states that a request resumed from",
    "states_skipped_no_room": "States that were not kept because no slot was free or worth evicting",
    "admissions_deferred": "Steps that requests waited for a prefix that another request was computing",
    "requests_paused": "Times that a running request was paused for want of KV blocks",
    "requests_evicted": "Times that a running request lost its memory and had to be computed again",
    "prompt_tokens_from_host": "Prompt tokens skipped because their prefix came back from the host's memory",
    "states_written_to_host": "States written to the host's memory, each with the KV before it",
    "states_restored_from_host": "States that came back from the host's memory, for a request that waited",
    "states_not_written_no_room": "States that were not written because the host's memory had no room",
    "host_writes_failed": "Copies to the host's memory that failed, or were of no use any more when they ended",
    "host_restores_failed": "Copies from the host's memory that failed, or were of no use any more when they ended",
    "prompt_tokens_from_disk": "Prompt tokens skipped because their prefix came back from the disk",
    "states_written_to_disk": "States written to the disk, each with the KV before it",
    "states_read_from_disk": "States read from the disk, for a request that waited",
    "disk_writes_failed": "Files that could not be written, or were of no use any more when they were",
    "disk_reads_failed": "Files that could not be read, or were not what had been written",
    "states_evicted": "Cached states that were evicted",
    "kv_blocks_evicted": "Cached KV blocks that were evicted",
    "steps": "Steps of the engine",
    "graph_steps": "Steps of the engine that replayed a CUDA graph",
    "steps_aborted": "Steps of the engine that failed; their requests are tried again",
}

STATE_SLOTS = (
    "Slots of the state pool by owner: free (for cached states), live (of a running request), reserved (for a boundary "
    "of this step), cached (findable), draft (of a draft window)"
)
KV_BLOCKS = "KV blocks by kind: free, in_use (of a running request), cached (findable, used by no running request)"
CACHE_BYTES = (
    "Bytes of the memory for KV blocks and states by use, of one rank: kv_in_use and states_running (of running "
    "requests, and where cached states are quantized all that is set aside for live ones), kv_cached and states_cached "
    "(findable), rings (of replayed states), unusable (in slabs, where neither fits), free"
)
HOST_BYTES = (
    "Bytes of the host tier by use, of one rank: kv_cached and states_cached (findable), kv_in_use (that copies read "
    "or write), states_reserved (for what is on its way there), free; nothing without a host tier"
)
DISK_BYTES = "Bytes of the entries in the disk tier, of one rank; nothing without a disk tier"
TIER_COPIES = "Copies between tiers that are under way, by the tier that they bring a state and its KV to"


def counter_text(name: str) -> str:
    """Return what a field of `CacheCounters` counts."""
    return COUNTER_TEXTS.get(name, name.replace("_", " ").capitalize())
