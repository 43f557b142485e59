"""Who may ask: keys, names, origins; and what every answer carries."""

import httpx2
import patient
import pytest

from tilestack.server.access import host_name
from tilestack.server.settings import ServerSettings

TEXT = {"prompt": "hello", "max_tokens": 2}
# What a browser asks before OpenAI's client for JavaScript may speak to a server of another site.
ASKED = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-lang"}
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
            assert ("is wrong" in refused.json()["error"]["message"]) == bool(headers)
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
    assert ServerSettings(host="Box.lan", hosts=("a",)).known_hosts >= {"a", "box.lan"}


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
    preflight = patient.options(url + "/v1/completions", headers=site | ASKED)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://site.example"
    told = preflight.headers["access-control-allow-headers"].split(",")
    assert {"authorization", "x-stainless-lang"} <= {name.strip() for name in told}
    known = {"Authorization": "Bearer k"}
    allowed = patient.post(url + "/v1/completions", json=TEXT, headers=site | known)
    assert allowed.headers["access-control-allow-origin"] == "https://site.example"
    assert patient.post(url + "/v1/completions", json=TEXT, headers=other | known).status_code == 403


def test_a_refused_page_is_told_how_it_may_ask(serve, fake):
    site = {"Origin": "https://site.example"}
    refused = patient.options(serve(fake) + "/v1/completions", headers=site | ASKED)
    assert refused.status_code == 403
    assert "--cors https://site.example" in refused.json()["error"]["message"]


def test_the_page_asks_through_a_proxy_that_names_another_host(serve, fake):
    """A browser tells which site a page is of, so that it need not be told from the Host that a proxy has written."""
    page = {"Origin": "https://box.example", "Sec-Fetch-Site": "same-origin"}
    url = serve(fake)
    assert patient.post(url + "/v1/completions", json=TEXT, headers=page).status_code == 200
    for other in ("cross-site", "same-site"):
        headers = page | {"Sec-Fetch-Site": other}
        assert patient.post(url + "/v1/completions", json=TEXT, headers=headers).status_code == 403


@pytest.mark.parametrize(
    "origin", ["example.org", "https://example.org/", "https://example.org/chat", "localhost:3000", ""]
)
def test_an_origin_that_no_browser_sends_is_refused_at_the_start(origin):
    with pytest.raises(ValueError, match="such as https://example"):
        ServerSettings(cors=("*", "null", "http://[::1]:3000", origin))


def test_HEAD_is_answered_as_GET_without_a_body(client):
    for path in ("/", "/health", "/metrics", "/v1/models", "/v1/models/nobody"):
        asked, told = client.get(path), client.head(path)
        assert (told.status_code, told.content) == (asked.status_code, b"")
        assert told.headers["content-type"] == asked.headers["content-type"]
    assert client.head("/v1/completions").status_code == 405
    counted = [line for line in client.get("/metrics").text.splitlines() if 'path="/health"' in line]
    assert counted[0].endswith(" 2.0")


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
