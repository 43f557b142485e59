"""The routes of OpenAI's Responses API: answer items, and look up, list and delete what was stored of that."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from tilestack.server.access import key_digest
from tilestack.server.errors import ApiError, naming, refuse
from tilestack.server.events import encode
from tilestack.server.responses.answers import Body, ResponseAnswers, shared_body
from tilestack.server.responses.conversation import FIELDS, Conversation, read_conversation, read_prompt
from tilestack.server.responses.store import Key, ResponseStore, StoredResponse
from tilestack.server.routes import ERRORS, EVENTS
from tilestack.server.schemas import ResponsesRequest
from tilestack.server.schemas.responses import ItemsQuery
from tilestack.server.service import Service, unless_client_leaves


def response_routes(service: Service) -> APIRouter:
    router = APIRouter(prefix="/v1/responses", responses=ERRORS)
    limits = service.settings.limits
    store = ResponseStore(limits.stored, limits.stored_bytes)

    @router.post("", responses=EVENTS)
    async def respond(body: ResponsesRequest, http: Request) -> Response:
        """Answer a text or items, and keep that for requests that continue it."""
        service.adapter(body.model)
        if body.store and not limits.stored:
            raise refuse("this server stores no responses; leave store out", "store")
        stores = body.store is not False and limits.stored > 0
        with naming(FIELDS):
            asked = read_conversation(body, store, owner(http), limits)
            chat, ids = await unless_client_leaves(http, read_prompt(service, body, asked.items))
            params, thinking = service.chat_terms(chat, ids)
            shared = shared_body(body, body.model or service.name, params, stores)

            def keep(answer: Body) -> None:
                if stores:
                    store.add((owner(http), answer["id"]), stored_response(answer, asked))

            answers = ResponseAnswers(shared, chat, service.texts, thinking, keep)
            return await service.answer(http, chat, [(ids, params)], answers)

    @router.get("/{id}")
    async def retrieve(id: str, http: Request) -> Response:
        """A stored response."""
        return Response(found((owner(http), id)).body, media_type="application/json")

    @router.get("/{id}/input_items")
    async def list_items(id: str, query: Annotated[ItemsQuery, Query()], http: Request) -> Response:
        """The items that a stored response answers, those of the responses before it included."""
        items = list(found((owner(http), id)).input_items())
        if query.order == "desc":
            items.reverse()
        if query.after is not None:
            places = [place for place, item in enumerate(items) if item["id"] == query.after]
            if not places:
                raise refuse(f"no item {query.after!r} in the input of {id!r}", "after")
            items = items[places[0] + 1 :]
        page = items[: query.limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": "", "last_id": ""}
        listed = {"object": "list", "data": page, **ends, "has_more": len(items) > len(page)}
        return Response(encode(listed), media_type="application/json")

    @router.delete("/{id}")
    async def delete(id: str, http: Request) -> dict[str, Any]:
        """Forget a response; those that continue it keep what they know of it."""
        found((owner(http), id))
        store.remove((owner(http), id))
        return {"id": id, "object": "response", "deleted": True}

    def found(key: Key) -> StoredResponse:
        if (response := store.responses.get(key)) is None:
            raise ApiError(404, f"no stored response {key[1]!r}", param="response_id", code="response_not_found")
        return response

    return router


def owner(http: Request) -> bytes:
    """Whose response it is: that of who asks with the same key."""
    return key_digest(http.headers)


def stored_response(body: Body, asked: Conversation) -> StoredResponse:
    head = {name: value for name, value in body.items() if name != "output"}
    ids = (*asked.ids, *(item["id"] for item in body["output"]))
    return StoredResponse(encode(head).encode(), asked.context, encode(body["output"]).encode(), ids)
