"""Who may ask: keys, names, origins; and what every answer carries."""

import httpx2
import patient
import pytest

from tilestack.server.access import host_name
from tilestack.server.settings import ServerSettings

TEXT = {"prompt": "hello", "max_tokens": 2}
PATHS = ("/v1/models", "/metrics", "/openapi.json", "/v1/nothing")


def test_a_key_is_asked_for_everywhere_but_for_health_and_the_page(serve, fake):
    url = serve(fake, api_key="sécret")
    for path in PATHS:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic sécret".encode()},
            {"Authorization": "Bearer"},
        ):
            refused = patient.get(url + path, headers=headers)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert refused.json()["error"]["code"] == "invalid_api_key"
    assert patient.post(url + "/v1/completions", json=TEXT).status_code == 401
    assert not fake.submitted
    assert patient.get(url + "/health").json() == {"status": "ok"}
    assert "<!doctype html>" in patient.get(url + "/").text


def test_the_key_opens(serve, fake):
    url = serve(fake, api_key="sécret")
    for known in ({"Authorization": "Bearer sécret".encode()}, {"Authorization": "bearer sécret".encode()}):
        assert patient.get(url + "/v1/models", headers=known).status_code == 200
        assert patient.post(url + "/v1/completions", json=TEXT, headers=known).status_code == 200


def test_a_loopback_server_answers_to_its_own_names_only(client):
    assert client.get("/health", headers={"Host": "localhost:1234"}).status_code == 200
    assert client.get("/health", headers={"Host": ""}).status_code == 200  # as balancers ask, over HTTP/1.0
    refused = client.post("/v1/completions", json=TEXT, headers={"Host": "rebound.example"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "unknown_host")


def test_names_may_be_added_and_other_interfaces_answer_to_any(serve, fake):
    url = serve(fake, hosts=("box.local",))
    assert patient.get(url + "/health", headers={"Host": "box.local"}).status_code == 200
    assert ServerSettings(host="0.0.0.0").known_hosts is None
    assert ServerSettings(host="0.0.0.0", hosts=("a",)).known_hosts >= {"a", "localhost"}


@pytest.mark.parametrize(
    ("given", "name"), [("[::1]:80", "::1"), ("Box:80", "box"), ("127.0.0.1", "127.0.0.1"), ("", "")]
)
def test_names_without_ports(given, name):
    assert host_name(given) == name


def test_pages_of_other_sites_may_not_ask_unless_told(serve, fake):
    site, other = {"Origin": "https://site.example"}, {"Origin": "https://other.example"}
    url = serve(fake)
    refused = patient.post(url + "/v1/completions", json=TEXT, headers=site)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "unknown_origin")
    assert "access-control-allow-origin" not in refused.headers
    assert patient.post(url + "/v1/completions", json=TEXT, headers={"Origin": url}).status_code == 200
    beside = {"Origin": str(httpx2.URL(url).copy_with(port=1))}  # what else listens on this machine is another site
    assert patient.post(url + "/v1/completions", json=TEXT, headers=beside).status_code == 403

    url = serve(fake, cors=("https://site.example",), api_key="k")
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = patient.options(url + "/v1/completions", headers=site | asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://site.example"
    known = {"Authorization": "Bearer k"}
    allowed = patient.post(url + "/v1/completions", json=TEXT, headers=site | known)
    assert allowed.headers["access-control-allow-origin"] == "https://site.example"
    assert patient.post(url + "/v1/completions", json=TEXT, headers=other | known).status_code == 403


def test_ids_of_requests_go_in_and_out(client):
    assert client.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = client.get("/health", headers={"X-Request-Id": "not/one of ours"}).headers["x-request-id"]
    assert made.startswith("req-")


def test_the_page_loads_nothing_from_elsewhere(client):
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http://" not in page.text.replace("http://www.w3.org/2000/svg", "")
    assert not [
        word
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(")
        if word in page.text
    ]
