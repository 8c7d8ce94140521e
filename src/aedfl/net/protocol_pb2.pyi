from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Header(_message.Message):
    __slots__ = ("protocol", "run", "source", "boot", "number", "kind", "fields", "model", "length")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run: str
    source: int
    boot: int
    number: int
    kind: str
    fields: _containers.RepeatedCompositeFieldContainer[Field]
    model: ModelInfo
    length: int
    def __init__(self, protocol: _Optional[int] = ..., run: _Optional[str] = ..., source: _Optional[int] = ..., boot: _Optional[int] = ..., number: _Optional[int] = ..., kind: _Optional[str] = ..., fields: _Optional[_Iterable[_Union[Field, _Mapping]]] = ..., model: _Optional[_Union[ModelInfo, _Mapping]] = ..., length: _Optional[int] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("parameters", "macs", "masked", "layout")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    MACS_FIELD_NUMBER: _ClassVar[int]
    MASKED_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    parameters: int
    macs: float
    masked: bool
    layout: bytes
    def __init__(self, parameters: _Optional[int] = ..., macs: _Optional[float] = ..., masked: _Optional[bool] = ..., layout: _Optional[bytes] = ...) -> None: ...

class Field(_message.Message):
    __slots__ = ("name", "item")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    name: str
    item: Item
    def __init__(self, name: _Optional[str] = ..., item: _Optional[_Union[Item, _Mapping]] = ...) -> None: ...

class Item(_message.Message):
    __slots__ = ("integer", "real", "text", "truth", "tensor", "items", "nothing")
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    REAL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TRUTH_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    NOTHING_FIELD_NUMBER: _ClassVar[int]
    integer: int
    real: float
    text: str
    truth: bool
    tensor: int
    items: Items
    nothing: bool
    def __init__(self, integer: _Optional[int] = ..., real: _Optional[float] = ..., text: _Optional[str] = ..., truth: _Optional[bool] = ..., tensor: _Optional[int] = ..., items: _Optional[_Union[Items, _Mapping]] = ..., nothing: _Optional[bool] = ...) -> None: ...

class Items(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Item]
    def __init__(self, items: _Optional[_Iterable[_Union[Item, _Mapping]]] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("taken", "reason", "later")
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LATER_FIELD_NUMBER: _ClassVar[int]
    taken: bool
    reason: str
    later: bool
    def __init__(self, taken: _Optional[bool] = ..., reason: _Optional[str] = ..., later: _Optional[bool] = ...) -> None: ...

class Receipts(_message.Message):
    __slots__ = ("receipts",)
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    receipts: _containers.RepeatedCompositeFieldContainer[Receipt]
    def __init__(self, receipts: _Optional[_Iterable[_Union[Receipt, _Mapping]]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("index", "name", "address", "serial", "state", "report", "silent")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    index: int
    name: str
    address: str
    serial: str
    state: str
    report: Report
    silent: float
    def __init__(self, index: _Optional[int] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., serial: _Optional[str] = ..., state: _Optional[str] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., silent: _Optional[float] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("update", "loss", "now", "bytes_sent", "bytes_received", "messages_sent", "messages_received", "messages_lost", "refused", "filtered", "staleness", "accuracy", "finished", "trouble", "update_seconds", "samples")
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_SENT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_LOST_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FILTERED_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    update: int
    loss: float
    now: float
    bytes_sent: int
    bytes_received: int
    messages_sent: int
    messages_received: int
    messages_lost: int
    refused: int
    filtered: int
    staleness: float
    accuracy: float
    finished: bool
    trouble: str
    update_seconds: float
    samples: int
    def __init__(self, update: _Optional[int] = ..., loss: _Optional[float] = ..., now: _Optional[float] = ..., bytes_sent: _Optional[int] = ..., bytes_received: _Optional[int] = ..., messages_sent: _Optional[int] = ..., messages_received: _Optional[int] = ..., messages_lost: _Optional[int] = ..., refused: _Optional[int] = ..., filtered: _Optional[int] = ..., staleness: _Optional[float] = ..., accuracy: _Optional[float] = ..., finished: _Optional[bool] = ..., trouble: _Optional[str] = ..., update_seconds: _Optional[float] = ..., samples: _Optional[int] = ...) -> None: ...

class Neighbours(_message.Message):
    __slots__ = ("sources", "targets")
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedScalarFieldContainer[int]
    targets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sources: _Optional[_Iterable[int]] = ..., targets: _Optional[_Iterable[int]] = ...) -> None: ...

class View(_message.Message):
    __slots__ = ("epoch", "members", "neighbours", "elapsed", "begun", "over", "revoked", "devices", "left", "devices_done")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    NEIGHBOURS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    DEVICES_DONE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    neighbours: Neighbours
    elapsed: float
    begun: bool
    over: bool
    revoked: bytes
    devices: int
    left: bool
    devices_done: bool
    def __init__(self, epoch: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., neighbours: _Optional[_Union[Neighbours, _Mapping]] = ..., elapsed: _Optional[float] = ..., begun: _Optional[bool] = ..., over: _Optional[bool] = ..., revoked: _Optional[bytes] = ..., devices: _Optional[int] = ..., left: _Optional[bool] = ..., devices_done: _Optional[bool] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("protocol", "name", "token", "instance", "address", "server", "layout", "parameters", "wish")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    WISH_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    name: str
    token: str
    instance: int
    address: str
    server: bool
    layout: bytes
    parameters: int
    wish: int
    def __init__(self, protocol: _Optional[int] = ..., name: _Optional[str] = ..., token: _Optional[str] = ..., instance: _Optional[int] = ..., address: _Optional[str] = ..., server: _Optional[bool] = ..., layout: _Optional[bytes] = ..., parameters: _Optional[int] = ..., wish: _Optional[int] = ...) -> None: ...

class Joined(_message.Message):
    __slots__ = ("index", "run", "beat", "view")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    index: int
    run: str
    beat: float
    view: View
    def __init__(self, index: _Optional[int] = ..., run: _Optional[str] = ..., beat: _Optional[float] = ..., view: _Optional[_Union[View, _Mapping]] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("name", "instance", "address", "epoch", "revoked", "report")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    name: str
    instance: int
    address: str
    epoch: int
    revoked: int
    report: Report
    def __init__(self, name: _Optional[str] = ..., instance: _Optional[int] = ..., address: _Optional[str] = ..., epoch: _Optional[int] = ..., revoked: _Optional[int] = ..., report: _Optional[_Union[Report, _Mapping]] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("protocol",)
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    def __init__(self, protocol: _Optional[int] = ...) -> None: ...

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Settings(_message.Message):
    __slots__ = ("protocol", "run", "settings")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run: str
    settings: str
    def __init__(self, protocol: _Optional[int] = ..., run: _Optional[str] = ..., settings: _Optional[str] = ...) -> None: ...

class Edge(_message.Message):
    __slots__ = ("source", "target")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    source: int
    target: int
    def __init__(self, source: _Optional[int] = ..., target: _Optional[int] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("run", "method", "protocol", "view", "edges", "beats_per_second")
    RUN_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    BEATS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    run: str
    method: str
    protocol: int
    view: View
    edges: _containers.RepeatedCompositeFieldContainer[Edge]
    beats_per_second: float
    def __init__(self, run: _Optional[str] = ..., method: _Optional[str] = ..., protocol: _Optional[int] = ..., view: _Optional[_Union[View, _Mapping]] = ..., edges: _Optional[_Iterable[_Union[Edge, _Mapping]]] = ..., beats_per_second: _Optional[float] = ...) -> None: ...
