"""Every endpoint and field of the OpenAPI document, with values that fit, nearly fit, and do not fit at all."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any
from urllib.parse import quote

from tests.attack.context import Attack
from tests.attack.target import ATTACKER
from tests.attack.wire import Connection, NoAnswerError, request_bytes
from tests.support.servers.operations import POOLED

MAX_DEPTH = 6
FEW_TOKENS = 6
TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
LONG = 5000  # characters
SHARE_RAW, SHARE_MUTATED = 0.08, 0.7
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, -(2**31), 2**63, -(2**63), 2**64, 10**30, 0.5, 1e-38, 1e308, -0.0),
    *("", " ", "\x00", "\ud800", "é" * 10, "\u202e", "a" * LONG, "null", "NaN", "{{ 7 * 7 }}", "../../etc/passwd"),
    *([], [[]], [None], [""] * 300, [0] * 3000, {}, {"": ""}, {"a": {"b": {"c": []}}}, [{"role": "user"}] * 40),
    *(float("nan"), float("inf"), float("-inf")),
)
RAW_BODIES = (
    *(b"", b"{", b"[", b"nul", b'"', b"\xff\xfe", b"\x00" * 100, b"[" * 5000, b'{"a":' * 3000, b"1" * 20000),
    *(b'{"model": "m", "model": "m"}', b'{"max_tokens": 1e999}', b'{"prompt": "\\ud800"}', b"-" * 50, b"{}" * 50),
)


class Fuzzer:
    """Bodies for the operations of one OpenAPI document, from one random number generator."""

    def __init__(self, document: dict[str, Any], model: str, rng: random.Random) -> None:
        self._schemas = document["components"]["schemas"]
        self._model = model
        self._rng = rng
        self.operations = [
            (method.upper(), path, operation)
            for path, methods in sorted(document["paths"].items())
            for method, operation in sorted(methods.items())
            if method in ("get", "post", "delete") and operation.get("operationId") not in POOLED
        ]

    def request(self) -> tuple[str, bytes]:
        """-> what is asked, and the bytes of the request."""
        rng = self._rng
        method, path, operation = rng.choice(self.operations)
        content = operation.get("requestBody", {}).get("content", {}).get("application/json")
        where = path
        while "{" in where:
            before, _, rest = where.partition("{")
            where = before + self._path_value() + rest.partition("}")[2]
        body = b"" if content is None else self._body(content)
        if rng.random() < 0.02:
            method = rng.choice(("GET", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "POST"))
        if method == "HEAD":
            method = "GET"
        return f"{method} {path}", request_bytes(method, where, body, ATTACKER)

    def _path_value(self) -> str:
        odd = self._rng.choice(("resp_0", self._model, "%00", "..%2f..", "a" * 300, "é", "\x7f", "x y"))
        return quote(odd, safe="%")

    def _body(self, content: dict[str, Any]) -> bytes:
        rng = self._rng
        if rng.random() < SHARE_RAW:
            return rng.choice(RAW_BODIES)
        examples = list(content.get("examples", {}).values())
        if examples and rng.random() < 0.5:
            body = json.loads(json.dumps(rng.choice(examples)["value"]))
        else:
            body = self._value(content["schema"], 0)
        if isinstance(body, dict):
            if rng.random() < SHARE_MUTATED:
                self._mutate(body, content["schema"])
            self._make_cheap(body)
        return json.dumps(body, ensure_ascii=rng.random() < 0.8).encode("utf-8", "surrogatepass")

    def _make_cheap(self, body: dict[str, Any]) -> None:
        """So that it ends soon; what is wrong stays wrong."""
        if self._rng.random() < 0.97 and isinstance(body.get("model", ""), str):
            body["model"] = self._model
        for name in TOKEN_LIMITS:
            if name not in body or body[name] is None or (type(body[name]) is int and body[name] > FEW_TOKENS):
                body[name] = FEW_TOKENS
        if type(body.get("n")) is int and 2 < body["n"] <= 128:
            body["n"] = 2

    def _mutate(self, body: dict[str, Any], schema: dict[str, Any]) -> None:
        rng = self._rng
        properties = self._properties(schema)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            place: Any = body
            while isinstance(place, dict) and place and rng.random() < 0.4:
                inner = rng.choice(list(place.values()))
                if isinstance(inner, list) and inner:
                    inner = rng.choice(inner)
                if not isinstance(inner, dict):
                    break
                place = inner
            names = list(properties) if place is body and properties else list(place)
            if not names:
                return
            name = rng.choice(names)
            if rng.random() < 0.15:
                place.pop(name, None)
            elif rng.random() < 0.1:
                place[f"{name}\u00e9" if rng.random() < 0.5 else "unknown_field"] = deepcopy(rng.choice(ODD_VALUES))
            elif place is body and rng.random() < 0.4:
                place[name] = self._edge(properties.get(name, {}))
            else:
                place[name] = deepcopy(rng.choice(ODD_VALUES))

    def _properties(self, schema: dict[str, Any]) -> dict[str, Any]:
        schema = self._resolve(schema)
        if "properties" in schema:
            properties: dict[str, Any] = schema["properties"]
            return properties
        for part in schema.get("anyOf", schema.get("oneOf", ())):
            if found := self._properties(part):
                return found
        return {}

    def _resolve(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema

    def _edge(self, schema: dict[str, Any]) -> Any:
        """The most that a field allows, or one more."""
        schema = self._resolve(schema)
        for part in schema.get("anyOf", schema.get("oneOf", ())):
            if self._resolve(part).get("type") != "null":
                return self._edge(part)
        more = self._rng.choice((0, 1))
        if "maximum" in schema:
            return schema["maximum"] + more
        if "minimum" in schema:
            return schema["minimum"] - more
        if "maxLength" in schema:
            return "a" * min(schema["maxLength"] + more, 20 * LONG)
        if "maxItems" in schema:
            item = self._value(schema.get("items", {}), MAX_DEPTH)
            return [item] * min(schema["maxItems"] + more, 5000)
        return self._value(schema, 0)

    def _value(self, schema: dict[str, Any], depth: int) -> Any:
        """Something that fits, more or less."""
        rng = self._rng
        schema = self._resolve(schema)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return rng.choice(schema["enum"])
        for form in ("anyOf", "oneOf"):
            if form in schema:
                return self._value(rng.choice(schema[form]), depth + 1)
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = rng.choice(kind)
        if kind == "object" or "properties" in schema:
            return self._object(schema, depth)
        if kind == "array":
            most = 0 if depth >= MAX_DEPTH else 3
            count = max(rng.randint(0, most), min(schema.get("minItems", 0), 3))
            return [self._value(schema.get("items", {}), depth + 1) for _ in range(count)]
        if kind == "string":
            return rng.choice(("hello", "a", "Once upon a time", "é", "tool", "[a-z]+", "x" * 100))
        if kind in ("integer", "number"):
            low, high = schema.get("minimum", 0), schema.get("maximum", 100)
            return rng.choice((low, high, rng.randint(int(low), max(int(low), int(min(high, 1000))))))
        if kind == "boolean":
            return rng.random() < 0.5
        return None if kind == "null" else rng.choice(ODD_VALUES)

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        required = set(schema.get("required", ()))
        share = 0.15 if depth == 0 else 0.3
        return {
            name: self._value(part, depth + 1)
            for name, part in schema.get("properties", {}).items()
            if name in required or (depth < MAX_DEPTH and self._rng.random() < share)
        }


async def run(attack: Attack) -> None:
    fuzzer = Fuzzer(attack.document, attack.model, attack.rng)

    async def send(connection: Connection) -> None:
        what, request = fuzzer.request()
        try:
            answer = await connection.ask(request)
        except NoAnswerError:
            attack.note(what, None)
            attack.part.unexpected[f"no answer to {what}"] += 1
            return
        attack.note(what, answer)

    await attack.crowd(send)
