"""The generate command up to the import of torch: read the files, check the flags against them, choose the device."""

import sys
from argparse import Namespace

from .arguments import check_generate_arguments, check_tiers, select_device, with_sampling
from .built_in_prompts import built_in_lines, editing_lines
from .commands import EDITING, GREEDY
from .launch import Launch
from .model_choice import chosen_directory, require_token_ids
from .prompts import read_prompts
from .quiet import hide_stacks_of_signals, quiet_libraries
from .results import check_writable


def generate(arguments: Namespace) -> int:
    """Run the command and return its exit status.

    Raises:
        UsageError: On a bad flag, file, line or device.
    """
    launch = Launch.of_environment()
    launch.num_replicas(arguments)
    directory = chosen_directory(arguments)
    has_file = arguments.prompts is not None
    edits = directory is not None and not has_file
    arguments = with_sampling(arguments, EDITING if edits else GREEDY)
    check_generate_arguments(arguments)
    check_tiers(arguments)
    lines = read_prompts(arguments.prompts) if has_file else editing_lines() if edits else built_in_lines()
    if directory is not None:
        directory.check_prompts(lines, arguments.prompts)
    if arguments.output_path is not None and launch.is_first:
        check_writable(arguments.output_path)
    if launch.is_first and arguments.top_k == 1 and (arguments.temperature != 1 or arguments.top_p):
        print("note: --top-k 1 is greedy, so --temperature and --top-p change nothing; try --top-k 0", file=sys.stderr)
    with quiet_libraries(arguments.log_level):
        device = select_device(arguments.device)
        # These import torch, which fixes the device.
        hide_stacks_of_signals()
        from .generation import Generation
        from .processes import joined_processes

        with joined_processes(launch, arguments, device) as replicas:
            generation = replicas.make(lambda: Generation(arguments, directory, device, replicas))
            if directory is not None and not generation.reads_text:  # a hub model, which was not on disk before
                require_token_ids(lines, arguments.prompts, directory.path)
            return generation.run(lines) if has_file else generation.run_and_compare(lines)
