"""``python -m rollart.workers.megatron.follower``: one of a trainer's processes but the first, which starts it."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import msgspec

from rollart.config import Config
from rollart.workers.worker import die_with_parent

logger = logging.getLogger(__name__)


def main() -> int:
    """Follow the first process; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rollart.workers.megatron.follower", description=__doc__)
    parser.add_argument("--rank", required=True, type=int)
    parser.add_argument("--device", required=True, type=int)
    parser.add_argument("--rendezvous", required=True, type=Path)
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--model-dir", required=True, type=Path)
    parser.add_argument("--parent", type=int)
    options = parser.parse_args()
    if options.parent:
        die_with_parent(options.parent)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("megatron").setLevel(logging.WARNING)
    config = msgspec.msgpack.decode(options.config.read_bytes(), type=Config)

    import torch

    from rollart.workers.megatron.group import follow
    from rollart.workers.megatron.parallel import Place

    torch.set_num_threads(config.trainer.threads)
    try:
        follow(config, options.model_dir, Place(options.rank, options.rendezvous, options.device))
    except Exception:  # the boundary of the process: recorded, and told by the exit code
        logger.exception("process %d of the trainer failed", options.rank)
        return 1
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
