"""The OpenAPI document makes clients, and it is true: every answer has a status and a body that it names, and no answer is a 5xx."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from filelock import FileLock

from service.app import build_app
from service.http import openapi
from tests.service.fakes import PATIENCE_S, fake_catalog
from tests.service.live import LiveService

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
# Routes whose successes must have been among what was tried; the others need inputs that a schema cannot describe.
REACHED = (
    "/v1/embeddings",
    "/v1/attention",
    "/embed",
    "/embed_all",
    "/rerank",
    "/predict",
    "/similarity",
    "/tokenize",
    "/v2/embed",
    "/v2/rerank",
    "/v1/rerank",
    "/v1/states",
)


TYPESCRIPT = Path(__file__).with_name("typescript")
KEY = "a-key-0123456789"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return build_app(fake_catalog(Path("none"), api_keys=(KEY,))).openapi()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def schemas(node: Any) -> Iterator[dict[str, Any]]:
    """Every schema inside a part of the document; what is an example is none."""
    if isinstance(node, dict):
        if {"type", "anyOf", "enum", "$ref"} & set(node) and not isinstance(node.get("type"), dict):
            yield node
        for key, value in node.items():
            if key not in ("example", "examples"):
                yield from schemas(value)
    elif isinstance(node, list):
        for value in node:
            yield from schemas(value)


# What generators stumble over ------------------------------------------------------------------------------------------------------------


def test_every_schema_has_a_title_of_its_own_that_is_a_name(document: dict[str, Any]) -> None:
    named = document["components"]["schemas"]
    assert all(schema["title"] == name for name, schema in named.items())
    assert all(re.fullmatch(r"[A-Z][A-Za-z0-9]*", name) for name in named)
    assert len({name.lower() for name in named}) == len(named), "files have these names"
    titles = [schema["title"] for schema in schemas({**document, "info": None}) if isinstance(schema.get("title"), str)]
    assert len(titles) == len(set(titles))


def test_no_type_is_null_alone(document: dict[str, Any]) -> None:
    choices = {id(choice) for schema in schemas(document) for key in ("anyOf", "oneOf") for choice in schema.get(key, ())}
    assert not [schema for schema in schemas(document) if schema.get("type") == "null" and id(schema) not in choices]


def test_the_members_of_an_enum_have_different_names(document: dict[str, Any]) -> None:
    enums = [schema["enum"] for schema in schemas(document) if "enum" in schema]
    assert enums
    for enum in enums:
        assert len({re.sub(r"[^a-z0-9]", "", str(value).lower()) for value in enum}) == len(enum), enum
    direction = document["components"]["schemas"]["TeiEmbedRequest"]["properties"]["truncation_direction"]
    assert direction["enum"] == ["Left", "Right"]
    assert 'Default: "Right"' in direction["description"]


def test_no_field_has_a_default_that_a_generator_would_require_or_always_send(document: dict[str, Any]) -> None:
    assert not [schema for schema in schemas(document) if "default" in schema]


def test_every_body_has_an_example_that_its_schema_takes(document: dict[str, Any]) -> None:
    from jsonschema import Draft202012Validator

    bodies = [(path, operation["requestBody"]["content"]) for path, _, operation in operations(document) if "requestBody" in operation]
    assert {path for path, content in bodies if "application/json" in content} <= set(openapi.EXAMPLES)
    for body in (content["application/json"] for _, content in bodies if "application/json" in content):
        Draft202012Validator({**body["schema"], "components": document["components"]}).validate(body["example"])
    for path, method, operation in operations(document):
        for parameter in operation.get("parameters", ()):
            if parameter["required"]:
                assert parameter["example"], (path, method)


def test_every_answer_is_described(document: dict[str, Any]) -> None:
    assert "HTTPValidationError" not in str(document)
    for path, method, operation in operations(document):
        for status, answer in operation["responses"].items():
            if path not in ("/health", "/ping", "/health/ready"):  # their status is the answer
                assert answer.get("content") or status in ("204", "304"), (method, path, status)
                assert all(content["schema"] for content in answer.get("content", {}).values()), (method, path, status)
        assert method in ("get", "delete") or "415" in operation["responses"]


def test_a_key_is_asked_for_where_keys_are_set(document: dict[str, Any]) -> None:
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert document["security"] == [{"bearer": []}]
    open_paths = {path for path, _, operation in operations(document) if operation.get("security") == []}
    assert {"/health", "/health/live", "/health/ready", "/ping", "/metrics", "/v2/health/live", "/v2/health/ready", "/"} >= open_paths
    assert ("/", "post") not in {(path, method) for path, method, operation in operations(document) if "security" in operation}
    without = build_app(fake_catalog(Path("none"))).openapi()
    assert "security" not in without
    assert "bearer" in without["components"]["securitySchemes"]


# Clients made from it --------------------------------------------------------------------------------------------------------------------


@pytest.mark.live
def test_every_example_is_answered(service: LiveService) -> None:
    """As it is in the document, without a `model`: the first that fits answers."""
    with httpx.Client(base_url=service.url, timeout=PATIENCE_S) as http:
        document = http.get("/openapi.json").json()
        state = http.post("/v1/states", json={"prompt": "def"}).json()["id"]
        conversation = http.post("/v1/conversations").json()["id"]
        for path, method, operation in operations(document):
            if body := operation.get("requestBody", {}).get("content", {}).get("application/json"):
                url = path.format(model="all-MiniLM-L6-v2", state=state, conversation_id=conversation)
                answer = http.request(method, url, json=body["example"])
                expected = [int(status) for status in operation["responses"] if status.startswith("2")]
                if path in ("/embed_sparse", "/encode", "/rerank_with_encoding"):  # no model of this service gives what they send
                    expected = [400, 424]
                assert answer.status_code in expected, (path, answer.text)


@pytest.mark.live
def test_a_python_client_that_is_generated_calls_the_service(service: LiveService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Path(sys.executable).with_name("openapi-python-client")
    command = [str(tool), "generate", "--url", f"{service.url}/openapi.json", "--output-path", str(tmp_path / "made"), "--meta", "none"]
    environment = {**os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}"}  # it formats what it has written with ruff
    done = subprocess.run([*command, "--fail-on-warning"], env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.syspath_prepend(tmp_path)
    models = importlib.import_module("made.models")

    def call(module: str, http: Any, **arguments: Any) -> Any:
        return importlib.import_module(f"made.api.{module}").sync(client=http, **arguments)

    with importlib.import_module("made").AuthenticatedClient(base_url=service.url, token=KEY) as http:
        body = models.EmbeddingRequest(input_=["the cat", "a dog"], model="all-MiniLM-L6-v2")
        embedded = call("open_ai.embeddings_v1_embeddings_post", http, body=body)
        assert [len(entry.embedding) for entry in embedded.data] == [384, 384]
        assert isinstance(embedded, models.EmbeddingResponse)
        assert embedded.usage.total_tokens == 8
        body = models.ChatRequest.from_dict({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3})
        said = call("open_ai.chat_v1_chat_completions_post", http, body=body)
        assert said.choices[0].message.role == "assistant"
        refused = call("open_ai.embeddings_v1_embeddings_post", http, body=models.EmbeddingRequest(input_="x", model="nobody"))
        assert isinstance(refused, models.OpenAIErrorResponse)
        assert refused.error.code == "model_not_found"


@pytest.fixture(scope="module")
def typescript(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the generator, the compiler and the client, installed as the lock file says unless `make test-live` has done so."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not here: a TypeScript client is not made (apt-get install nodejs npm)")
    with FileLock(tmp_path_factory.getbasetemp().parent / "npm.lock"):
        if not (TYPESCRIPT / "node_modules" / ".package-lock.json").exists():
            subprocess.run(["npm", "ci"], cwd=TYPESCRIPT, capture_output=True, timeout=300, check=True)
    folder = tmp_path_factory.mktemp("typescript")
    shutil.copy(TYPESCRIPT / "client.ts", folder)
    shutil.copy(TYPESCRIPT / "package.json", folder)
    (folder / "node_modules").symlink_to(TYPESCRIPT / "node_modules")
    return folder


@pytest.mark.live
def test_a_typescript_client_that_is_generated_calls_the_service(service: LiveService, typescript: Path) -> None:
    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=typescript, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    tools = typescript / "node_modules" / ".bin"
    run(str(tools / "openapi-typescript"), f"{service.url}/openapi.json", "--output", "schema.d.ts")
    run(str(tools / "tsc"), "--strict", "--target", "es2022", "--module", "nodenext", "--lib", "es2022,dom", "client.ts")
    said = json.loads(run("node", "client.js", service.url, KEY))
    assert said == {
        "embeddings": [384, 384],
        "rerank": 1,
        "cohere": 2,
        "tei": [384],
        "completion": "length",
        "chat": "assistant",
        "response": "output_text",
        "more": True,
        "items": ["system", "user", "assistant"],
        "forks": ["fork", "fork"],
        "back": 1,
        "lineage": 1,
        "cached": True,
        "deleted": True,
        "gone": "state_not_found",
        "models": "all-MiniLM-L6-v2",
        "model": "all-MiniLM-L6-v2",
        "tensors": [1, 384],
        "refused": "model_not_found",
    }


def test_the_lock_file_names_no_registry() -> None:
    packages = json.loads((TYPESCRIPT / "package-lock.json").read_text())["packages"]
    assert not [name for name, package in packages.items() if "resolved" in package]
    assert all("integrity" in package for name, package in packages.items() if name)


@pytest.mark.live
def test_schemathesis_finds_nothing(service: LiveService, tmp_path: Path) -> None:
    httpx.post(f"{service.url}/v1/states", json={"prompt": "def", "name": "kept"}, timeout=PATIENCE_S).raise_for_status()
    command = [str(Path(sys.executable).with_name("schemathesis")), "--no-color", "run", f"{service.url}/openapi.json"]
    options = [
        "--checks",
        CHECKS,
        "--request-timeout",
        "60",
        "--max-examples",
        "20",
        "--generation-deterministic",
        "--phases",
        "examples,fuzzing",
    ]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([*command, *options], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-8000:]
    with urllib.request.urlopen(f"{service.url}/metrics") as answer:
        succeeded = set(re.findall(r'te_request_success\{method="([^"]+)"', answer.read().decode()))
    assert set(REACHED) <= succeeded
