"""What prl leaves out of vLLM's scheduling on a CPU, with the same result.

Written for the version of vLLM in `worker.py`, and like there vLLM is imported inside the functions.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


def keep_blocks() -> None:
    """Have the scheduler look for blocks of the key-value cache where a sequence needs one, and not for each token.

    vLLM asks each of a dozen functions in every pass, also while the next token has its place in a block of 32 or more.
    """
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.request import RequestStatus

    allocate, plain = KVCacheManager.allocate_slots, {"num_lookahead_tokens": 0}

    def allocate_slots(manager: "KVCacheManager", request: "Request", num_new_tokens: int, **options: Any) -> Any:
        if num_new_tokens == 1 and options == plain and request.status == RequestStatus.RUNNING:
            managers = manager.coordinator.single_type_managers
            if len(managers) == 1 and type(managers[0]) is FullAttentionManager and has_place(managers[0], request):
                return manager.empty_kv_cache_blocks
        return allocate(manager, request, num_new_tokens, **options)

    KVCacheManager.allocate_slots = allocate_slots


def has_place(blocks: Any, request: "Request") -> bool:
    """Whether a sequence's next token has a place in the blocks that it holds, and fills none that is to be cached."""
    end, size, request_id = request.num_computed_tokens + 1, blocks.block_size, request.request_id
    return (
        end <= len(blocks.req_to_blocks.get(request_id, ())) * size
        and end // size <= blocks.num_cached_block.get(request_id, 0)
        and size == blocks.block_pool.hash_block_size
        and request_id not in blocks._partial_hit_reqs
    )
