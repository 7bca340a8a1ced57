"""The page `/docs` loads nothing from other hosts and works with an API key."""

import json
import re
import sys
from pathlib import Path

import pytest

from megatron_mamba_cache.server.endpoints import GROUPS, OPERATIONS
from tests.server.browser import CHROMIUM, chromium_page
from tests.server.front_end import RED, front_end
from tests.server.running_server import bearer

pytest.importorskip("fastapi_offline")


def test_documentation_page_loads_only_from_this_server() -> None:
    with front_end() as server, server.client() as http:
        page = http.get("/docs")
        assert page.status_code == 200
        links = re.findall(r"""(?:src|href|url)[=:]\s*["']([^"']*)["']""", page.text)
        assert len(links) >= 4 and "//" not in page.text.replace("<!--", "").replace("// ", "")
        for link in links:
            if not link.startswith("data:"):
                assert http.get(f"/{link}").status_code == 200, link
        styles = http.get("/docs/assets/swagger-ui.css").text
        assert not re.search(r"url\((?!['\"]?data:)", styles) and "@import" not in styles


def test_documentation_page_requires_a_key_when_the_server_has_keys() -> None:
    with front_end() as server, server.client() as http, server.client("no-key") as other:
        for path in ("/docs", "/docs/assets/swagger-ui-bundle.js", "/openapi.json"):
            assert other.get(path).status_code == 401
        assert "Basic" in other.get("/docs").headers["www-authenticate"]  # makes a browser ask for the key
        description = http.get("/openapi.json").json()
        assert description["components"]["securitySchemes"] == {"API key": {"type": "http", "scheme": "bearer"}}
        assert description["security"] == [{"API key": []}]
    with front_end(keys=()) as server, server.client() as http:
        assert "security" not in http.get("/openapi.json").json()


def test_error_names_the_install_command_when_page_files_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_mamba_cache.server.endpoints._asset_folder", lambda: None)
    with front_end() as server, server.client() as http:
        reply = http.get("/docs")
        assert reply.status_code == 501 and "pip install" in reply.json()["error"]["message"]


def test_every_operation_has_a_summary_and_a_group() -> None:
    with front_end(describes_tokenizer=True) as server, server.client() as http:
        schema = http.get("/openapi.json").json()
    found = {
        (method, path): (*operation.get("tags", ()), operation["summary"])
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    }
    assert found == dict(OPERATIONS)
    assert {group for group, _ in found.values()} == {group["name"] for group in schema["tags"]} == set(GROUPS)


def test_openapi_schema_omits_disabled_endpoints() -> None:
    with front_end() as server, server.client() as http:
        assert "/tokenizer_info" not in http.get("/openapi.json").json()["paths"]


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_documentation_page_shows_operations_and_contacts_no_other_host(tmp_path: Path) -> None:
    with front_end() as server, chromium_page(tmp_path / "profile") as page:
        page.open(f"{server.listening.url}/docs", bearer(RED))
        page.wait_for("document.querySelectorAll('.opblock').length > 5")
        assert page.value("document.querySelector('.authorize') !== null")
        assert page.value("document.querySelectorAll('.opblock-tag').length") == len(GROUPS)
        asked = json.loads(page.value("JSON.stringify(performance.getEntriesByType('resource').map(one => one.name))"))
        assert asked and all(url.startswith((server.listening.url, "data:")) for url in asked), asked
        print(asked, file=sys.stderr)
        assert page.errors == []
