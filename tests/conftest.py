"""Fixtures that more than one file of tests uses: engines, which are started once."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.engines import DrivenWorker, random_model, save_shape

os.environ.setdefault("HF_HUB_OFFLINE", "1")


async def _driven(factory: pytest.TempPathFactory, *, tied: bool) -> AsyncIterator[DrivenWorker]:
    folder = factory.mktemp("tied" if tied else "untied")
    model_dir = save_shape(random_model(0, tied=tied), folder / "model")
    driven = DrivenWorker(model_dir, folder / "store")
    try:
        await driven.worker.setup()
        yield driven
    finally:
        await driven.worker.teardown()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def untied_worker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DrivenWorker]:
    """A worker whose engine runs; what it serves is up to the tests."""
    async for driven in _driven(tmp_path_factory, tied=False):
        yield driven


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tied_worker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DrivenWorker]:
    """The same for a model whose embedding is its head."""
    async for driven in _driven(tmp_path_factory, tied=True):
        yield driven
