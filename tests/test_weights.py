"""The weight store: what is published is what is pulled, whole or not at all."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.weights.local import LocalStore
from rollart.weights.mapped import open_weights
from rollart.weights.store import DamagedWeights, MissingWeights, NamedBuffer, StoreError
from rollart.weights.tensors import buffers_of, tensors_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store", bucket_bytes=1024)


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embedding": torch.randn(37, 16, generator=generator),
        "scale": torch.randn((), generator=generator),
        "half": torch.randn(9, 5, generator=generator).to(torch.bfloat16),
        "transposed": torch.randn(6, 7, generator=generator).T,
        "nothing": torch.empty(0, 4),
        "large": torch.randn(1000, generator=generator),
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


def first_bucket(manifest: str) -> Path:
    return next(path for path in sorted(Path(manifest).parent.iterdir()) if path.name != "manifest")


def test_what_is_published_is_what_is_pulled(store: LocalStore) -> None:
    tensors = model()
    manifest = store.publish(3, buffers_of(tensors.items()))
    with store.pull(manifest) as weights:
        assert weights.manifest.version == 3
        assert len(weights.manifest.buckets) > 1
        assert_same(dict(tensors_of(weights)), tensors)


@settings(deadline=None, max_examples=30)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=8),
    bucket_bytes=st.integers(1, 4096),
    seed=st.integers(0, 1000),
)
def test_any_shapes_and_bucket_sizes(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], bucket_bytes: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"t{i}": torch.randint(0, 2, shape, generator=generator).to(DTYPES[(seed + i) % len(DTYPES)])
        for i, shape in enumerate(shapes)
    }
    store = LocalStore(tmp_path_factory.mktemp("store"), bucket_bytes=bucket_bytes)
    with store.pull(store.publish(0, buffers_of(tensors.items()))) as weights:
        assert_same(dict(tensors_of(weights)), tensors)
        for tensor in weights.manifest.tensors:
            assert tensor.offset % 64 == 0


def test_tensors_lie_on_the_mapped_memory_and_never_change_the_store(store: LocalStore) -> None:
    manifest = store.publish(0, buffers_of(model().items()))
    with store.pull(manifest) as weights:
        first, again = dict(tensors_of(weights)), dict(tensors_of(weights))
        assert first["large"].data_ptr() == again["large"].data_ptr()
        first["large"].zero_()
    with store.pull(manifest) as weights:
        assert_same(dict(tensors_of(weights)), model())


def test_a_version_is_published_once(store: LocalStore) -> None:
    manifest = store.publish(1, buffers_of(model(1).items()))
    with pytest.raises(ValueError, match="version 1 is in the store"):
        store.publish(1, buffers_of(model(2).items()))
    with store.pull(manifest) as weights:
        assert_same(dict(tensors_of(weights)), model(1))


def test_nothing_is_visible_until_the_manifest_is_written_last(store: LocalStore) -> None:
    seen: list[bool] = []

    def manifests() -> list[Path]:
        return list(store.root.glob("v5-*/manifest"))

    def tensors() -> Iterator[NamedBuffer]:
        for tensor in buffers_of(model().items()):
            seen.append(bool(manifests()))
            yield tensor
        assert any(store.root.glob("v5-*/*"))

    manifest = Path(store.publish(5, tensors()))
    assert manifests() == [manifest]
    assert seen == [False] * len(model())
    newest = max(manifest.parent.iterdir(), key=lambda path: path.stat().st_ctime_ns)
    assert newest == manifest


def test_a_failed_publication_leaves_nothing_and_can_be_repeated(store: LocalStore) -> None:
    def broken() -> Iterator[NamedBuffer]:
        yield from buffers_of(model().items())
        raise RuntimeError("the trainer broke")

    with pytest.raises(RuntimeError, match="the trainer broke"):
        store.publish(0, broken())
    assert list(store.root.iterdir()) == []
    store.publish(0, buffers_of(model().items()))


def test_what_a_killed_publisher_left_is_replaced(store: LocalStore) -> None:
    (store.root / "v2-abandoned").mkdir()
    (store.root / "v2-abandoned" / "abandoned-00000").write_bytes(b"half")
    with store.pull(store.publish(2, buffers_of(model().items()))) as weights:
        assert_same(dict(tensors_of(weights)), model())
    assert not (store.root / "v2-abandoned").exists()


def test_a_changed_byte_is_found_and_its_bucket_named(store: LocalStore) -> None:
    manifest = store.publish(0, buffers_of(model().items()))
    bucket = first_bucket(manifest)
    with bucket.open("r+b") as file:
        file.seek(100)
        byte = file.read(1)
        file.seek(100)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(DamagedWeights, match=bucket.name):
        store.pull(manifest)


def test_a_short_bucket_is_found_without_reading_it(store: LocalStore) -> None:
    manifest = store.publish(0, buffers_of(model().items()))
    bucket = first_bucket(manifest)
    with bucket.open("r+b") as file:
        file.truncate(10)
    with pytest.raises(DamagedWeights, match=f"{bucket.name}.* has 10 bytes"):
        open_weights(manifest, verify=False)


def test_a_missing_version_or_bucket_is_said(store: LocalStore) -> None:
    with pytest.raises(MissingWeights, match="no weights at"):
        store.pull(str(store.root / "v9" / "manifest"))
    manifest = store.publish(0, buffers_of(model().items()))
    bucket = first_bucket(manifest)
    bucket.unlink()
    with pytest.raises(MissingWeights, match=bucket.name):
        store.pull(manifest)


def test_a_manifest_that_is_none_is_refused(store: LocalStore) -> None:
    manifest = store.publish(0, buffers_of(model().items()))
    Path(manifest).write_text('{"format": 1')
    with pytest.raises(DamagedWeights, match="no manifest"):
        store.pull(manifest)


def test_collect_removes_old_versions_and_never_breaks_a_reader(store: LocalStore) -> None:
    manifests = [store.publish(version, buffers_of(model(version).items())) for version in range(4)]
    weights = store.pull(manifests[0])
    store.collect(2)
    assert sorted(path.name.partition("-")[0] for path in store.root.glob("v*")) == ["v2", "v3"]
    tensors = dict(tensors_of(weights))
    weights.close()
    assert_same(tensors, model(0))
    with pytest.raises(MissingWeights):
        store.pull(manifests[0])
    with store.pull(manifests[2]) as newer:
        assert_same(dict(tensors_of(newer)), model(2))
    store.collect(2)


def test_closed_weights_say_so(store: LocalStore) -> None:
    weights = store.pull(store.publish(0, buffers_of(model().items())))
    weights.close()
    with pytest.raises(StoreError, match="closed"):
        list(weights)


def test_only_the_owner_can_read(store: LocalStore) -> None:
    store.publish(0, buffers_of(model().items()))
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
    for path in store.root.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


@pytest.mark.parametrize(
    ("dtype", "shape", "reason"),
    [("float32", (3,), "has 8 bytes"), ("float8_e4m3", (8,), "can't be stored")],
)
def test_a_buffer_that_is_not_what_it_says_is_refused(
    store: LocalStore, dtype: str, shape: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(StoreError, match=reason):
        store.publish(0, [("w", dtype, shape, numpy.zeros(2, numpy.float32))])
    assert list(store.root.iterdir()) == []
