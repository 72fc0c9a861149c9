"""Bounds for what Kafka's consumers are sent: how large a batch may become when it is decompressed, how many records it
may have, and how large a record may be.

The driver decompresses a whole batch at once, of whatever size, and stops reading a partition for ever at a record
that it cannot decode. Here a mark takes the place of a record or batch that cannot be read, and the rest is read. This
changes modules of aiokafka, whose version is limited for this reason (pyproject.toml).
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final

from aiokafka.codec import _detect_xerial_stream
from aiokafka.consumer import fetcher
from aiokafka.errors import UnsupportedCodecError
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.legacy_records import LegacyRecordBatch
from msgspec import Struct

__all__ = ["BATCH_BYTES_MAX", "BATCH_RECORDS_MAX", "RECORD_BYTES_MAX", "Unreadable", "bound_batches", "no_key"]

# Decompressed. A batch is decompressed in one step of the event loop, which takes up to about 5 ms a megabyte.
BATCH_BYTES_MAX: Final = 4 * 1024 * 1024
# As many commands as have room in it. A kilobyte can hold hundreds of thousands of records without a value.
BATCH_RECORDS_MAX: Final = 20_000
RECORD_BYTES_MAX: Final = 1024 * 1024  # of a value

_OFFSET_MAX: Final = 2**62

_BLOCKS_MAX: Final = BATCH_BYTES_MAX // 1_024  # clients make no smaller blocks

_CODECS = ("snappy", "lz4", "zstd")
_DriverRecords: Any = fetcher.PartitionRecords


class Unreadable(bytes):
    """The value of a record that stands for one record, or for a batch, that cannot be read: the reason as text.

    `is_held`: it could be read at another time, so that nothing after it must be read; the reason says what to do."""

    is_held = False


class _TooLarge(Exception):
    def __init__(self) -> None:
        super().__init__(f"the batch has more than {BATCH_BYTES_MAX} bytes when it is decompressed")


class _Record(Struct, gc=False):
    """A record as the driver reads it, without key and headers: they are not used, and have no limit of size."""

    offset: int
    timestamp: int
    timestamp_type: int
    value: bytes | None
    checksum: int | None = None
    key: None = None
    headers: tuple[()] = ()


class _Batches:
    """The batches of one answer of a broker."""

    def __init__(self, batches: Any) -> None:
        self.has_next = batches.has_next
        self._next_batch = batches.next_batch

    def next_batch(self) -> Any:
        batch = self._next_batch()
        return batch if batch is None or batch.is_control_batch else _Batch(batch)


class _Batch:
    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._is_intact = True

    def validate_crc(self) -> bool:
        """Always true: the driver would stop reading, also all other partitions."""
        self._is_intact = self._batch.validate_crc()
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def __iter__(self) -> Iterator[_Record]:
        batch = self._batch
        if not self._is_intact:
            value = Unreadable(b"the checksum of a batch is wrong; repair or remove it, and start again")
            value.is_held = True
            yield _Record(_OFFSET_MAX, 0, 0, value)  # that of the batch may be wrong, and the driver skips lower ones
            return
        first = batch.base_offset  # of those that cannot be read
        try:
            if batch.next_offset - first > BATCH_RECORDS_MAX:
                raise ValueError(f"it has more than {BATCH_RECORDS_MAX} records")
            for record in batch:
                value = record.value
                if value is not None and len(value) > RECORD_BYTES_MAX:
                    value = Unreadable(b"a record with a value of more than %d bytes" % RECORD_BYTES_MAX)
                yield _Record(record.offset, record.timestamp, record.timestamp_type, value)
                first = record.offset + 1
        except Exception as error:  # nothing that a tenant sends may stop the reading
            text = (
                f"the records {first} to {batch.next_offset - 1}, a batch or the rest of one, cannot be read: {error!r}"
            )
            is_held = isinstance(error, UnsupportedCodecError)
            if is_held:
                text = f"{error}; install what aiokafka needs for it (pip install cramjam), and start again"
            value = Unreadable(text[:500].encode())
            value.is_held = is_held
            # The last offset of the batch: the driver continues after it.
            yield _Record(batch.next_offset - 1, max(batch.max_timestamp or 0, 0), 0, value)


class _PartitionRecords(_DriverRecords):  # type: ignore[misc]
    def __init__(
        self, partition: Any, records: Any, aborted: Any, offset: int, key_decoder: Any, *rest: Any, **options: Any
    ) -> None:
        if key_decoder is no_key:
            records = _Batches(records)
        super().__init__(partition, records, aborted, offset, key_decoder, *rest, **options)


def no_key(key: bytes | None) -> None:
    """The `key_deserializer` of a consumer to which the bounds apply."""


def bound_batches() -> None:
    """May be called again. Other consumers of the process read as before, except that the limit of decompressed bytes
    applies to them too."""
    fetcher.PartitionRecords = _PartitionRecords
    for reader in (DefaultRecordBatch, LegacyRecordBatch):
        module = sys.modules[reader.__module__]  # the compiled one, if there is one for this platform
        module.gzip_decode = _gunzip  # type: ignore[attr-defined]
        for codec in _CODECS:
            if hasattr(module, f"{codec}_decode"):
                setattr(module, f"{codec}_decode", _bounded(codec))


def _gunzip(payload: Any) -> bytes:
    decompress = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    data = decompress.decompress(payload, BATCH_BYTES_MAX)
    if not decompress.eof:
        raise _TooLarge if len(data) >= BATCH_BYTES_MAX else ValueError("the compressed data end too early")
    return data


def _bounded(codec: str) -> Any:
    """Decompresses into a buffer of the largest size allowed. Its pages take memory only once they are written."""

    def decode(payload: Any) -> bytes:
        cramjam = import_module("cramjam")  # optional: without it the driver has refused the batch already
        into = {
            "lz4": cramjam.lz4.decompress_into,
            "zstd": cramjam.zstd.decompress_into,
            "snappy": cramjam.snappy.decompress_raw_into,
        }[codec]
        buffer = bytearray(BATCH_BYTES_MAX)
        room, size = memoryview(buffer), 0
        try:
            if codec == "snappy" and _detect_xerial_stream(payload):  # blocks, each with its length before it
                at = 16
                for _ in range(_BLOCKS_MAX):
                    if at >= len(payload):
                        break
                    end = at + 4 + int.from_bytes(payload[at : at + 4], "big")
                    size += into(payload[at + 4 : end], room[size:])
                    at = end
                else:
                    raise _TooLarge
            else:
                size = into(payload, room)
        except cramjam.DecompressionError:
            raise _TooLarge from None
        return bytes(room[:size])

    return decode
