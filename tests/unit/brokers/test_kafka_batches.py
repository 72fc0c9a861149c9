"""What is read of batches, which any client of Kafka may have written: whatever is in one, reading goes on after it."""

from __future__ import annotations

import gzip
import struct
from typing import Any

import cramjam
import pytest
from aiokafka import codec
from aiokafka.consumer import fetcher
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.record.util import calc_crc32c
from aiokafka.structs import TopicPartition

from duetime.brokers.kafka_batches import (
    BATCH_BYTES_MAX,
    BATCH_RECORDS_MAX,
    RECORD_BYTES_MAX,
    Unreadable,
    bound_batches,
    no_key,
)

Value = bytes | None
HEADER_BYTES = 61  # of a batch
GZIP, SNAPPY, LZ4, ZSTD = CODECS = (1, 2, 3, 4)
XERIAL = struct.pack(">bccccccBii", -126, b"S", b"N", b"A", b"P", b"P", b"Y", 0, 1, 1)


def batch(first: int, *values: Value, header: str = "name", compression: int = 0) -> bytes:
    builder = DefaultRecordBatchBuilder(2, compression, 0, -1, -1, -1, 1 << 30)
    for index, value in enumerate(values):
        builder.append(index, 1_000 + index, b"key", value, [(header, b"\xff")])
    return struct.pack(">q", first) + bytes(builder.build())[8:]


def changed(whole: bytes, old: bytes, new: bytes) -> bytes:
    """With the checksum that a broker would ask for."""
    assert whole.count(old) >= 1
    whole = whole[:HEADER_BYTES] + whole[HEADER_BYTES:].replace(old, new, 1)
    return whole[:17] + struct.pack(">I", calc_crc32c(whole[21:])) + whole[21:]


def with_body(whole: bytes, body: bytes) -> bytes:
    head = bytearray(whole[:HEADER_BYTES])
    struct.pack_into(">i", head, 8, HEADER_BYTES - 12 + len(body))
    struct.pack_into(">I", head, 17, calc_crc32c(bytes(head[21:]) + body))
    return bytes(head) + body


def read(*batches: bytes) -> list[Any]:
    bound_batches()
    records = MemoryRecords(b"".join(batches))
    partition = TopicPartition("commands", 0)
    return list(fetcher.PartitionRecords(partition, records, None, 0, no_key, None, True, fetcher.READ_COMMITTED))


@pytest.mark.parametrize("compression", CODECS)
def test_good_batches_are_read_as_they_are(compression: int) -> None:
    records = read(batch(5, b"a", None, b""), batch(8, b"d" * 1_000, compression=compression))
    assert [(record.offset, record.value) for record in records] == [(5, b"a"), (6, None), (7, b""), (8, b"d" * 1_000)]
    assert [record.timestamp for record in records] == [1_000, 1_001, 1_002, 1_000]


def test_a_value_without_bounds_is_replaced_by_its_reason() -> None:
    large, small = read(batch(0, b"x" * (RECORD_BYTES_MAX + 1), b"x" * RECORD_BYTES_MAX))
    assert isinstance(large.value, Unreadable)
    assert not large.value.is_held
    assert bytes(large.value) == b"a record with a value of more than 1048576 bytes"
    assert len(small.value) == RECORD_BYTES_MAX


def test_a_header_whose_name_is_not_utf_8_ends_its_batch_and_no_other() -> None:
    bad = changed(batch(5, b"a", b"b", b"c", header="odd-name"), b"odd-name", b"\xff\xfe--name")
    records = read(bad, batch(8, b"d"))
    assert [record.offset for record in records] == [7, 8]
    assert records[0].value.startswith(b"the records 5 to 7, ")
    assert not records[0].value.is_held
    assert records[1].value == b"d"


def test_records_before_the_one_that_cannot_be_read_are_read() -> None:
    whole = batch(5, b"first", b"second", b"third")
    at = whole.index(b"second") - 1
    records = read(with_body(whole, whole[HEADER_BYTES:at] + b"\x7f" + whole[at + 1 :]), batch(8, b"d"))
    assert [record.offset for record in records] == [5, 7, 8]
    assert records[1].value.startswith(b"the records 6 to 7, ")


def compressed(data: bytes, compression: int) -> bytes:
    if compression == GZIP:
        return gzip.compress(data, compresslevel=1)
    if compression == SNAPPY:
        return bytes(codec.snappy_encode(data))
    return bytes((cramjam.lz4 if compression == LZ4 else cramjam.zstd).compress(data))


@pytest.mark.parametrize("compression", CODECS)
@pytest.mark.parametrize("size", [BATCH_BYTES_MAX + 1, 4 * BATCH_BYTES_MAX])
def test_a_batch_that_is_too_large_when_it_is_decompressed(size: int, compression: int) -> None:
    whole = batch(5, b"a" * 1_000, b"b" * 1_000, compression=compression)
    records = read(with_body(whole, compressed(bytes(size), compression)), batch(7, b"d"))
    assert [record.offset for record in records] == [6, 7]
    assert b"cannot be read" in records[0].value


@pytest.mark.parametrize("length", [0, 1])
def test_a_batch_of_very_many_tiny_blocks_is_not_decompressed(length: int) -> None:
    blocks = struct.pack(">i", length) + bytes(length)
    records = read(with_body(batch(5, b"a" * 1_000, compression=SNAPPY), XERIAL + blocks * 100_000), batch(6, b"d"))
    assert [record.offset for record in records] == [5, 6]
    assert b"cannot be read" in records[0].value


def test_a_batch_with_more_records_than_commands_have_room_is_one_record() -> None:
    assert len(read(batch(5, *[None] * BATCH_RECORDS_MAX, compression=GZIP))) == BATCH_RECORDS_MAX
    after = 5 + BATCH_RECORDS_MAX + 1
    records = read(batch(5, *[None] * (BATCH_RECORDS_MAX + 1), compression=GZIP), batch(after, b"d"))
    assert [record.offset for record in records] == [after - 1, after]
    assert f"more than {BATCH_RECORDS_MAX} records" in bytes(records[0].value).decode()


# Each process of the tests must find the same names: without `mtime`, the time would be in one.
@pytest.mark.parametrize("body", [b"", b"not gzip", gzip.compress(b"", mtime=0)[:-6]], ids=("empty", "text", "cut off"))
def test_a_batch_that_cannot_be_decompressed(body: bytes) -> None:
    records = read(with_body(batch(5, b"a", b"b", compression=GZIP), body), batch(7, b"d"))
    assert [record.offset for record in records] == [6, 7]
    assert isinstance(records[0].value, Unreadable)


def test_other_consumers_of_the_process_read_keys_and_headers() -> None:
    bound_batches()
    records = MemoryRecords(batch(5, b"a"))
    partition = TopicPartition("events", 0)
    (record,) = fetcher.PartitionRecords(partition, records, None, 0, None, None, True, fetcher.READ_COMMITTED)
    assert (record.key, record.headers) == (b"key", (("name", b"\xff"),))


def test_a_batch_whose_checksum_is_wrong_is_held_and_does_not_stop_other_partitions() -> None:
    good, bad = batch(5, b"a"), bytearray(batch(6, b"b"))
    bad[-1] ^= 1
    first, held, *_ = read(good, bytes(bad), batch(7, b"c"))
    assert (first.offset, first.value) == (5, b"a")
    assert isinstance(held.value, Unreadable)
    assert held.value.is_held
    assert held.value.startswith(b"the checksum of a batch is wrong")


def test_a_batch_whose_codec_is_not_installed_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = batch(5, b"a" * 1_000, compression=ZSTD)
    monkeypatch.setattr(codec, "cramjam", None)
    (held,) = read(whole)
    assert (held.offset, held.value.is_held, b"pip install cramjam" in held.value) == (5, True, True)
