"""/v1/files: upload, list, get, content, delete."""

from __future__ import annotations

from urllib.parse import quote

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.admission import tenant_of
from tessera.app.generate.served_models import model_of
from tessera.app.http.body import json_response
from tessera.app.http.description import Description, PathName
from tessera.app.openai.files.content_response import ContentResponse
from tessera.app.openai.files.files import OUTPUT_PURPOSES, UPLOAD_PURPOSES, file_object, files_of
from tessera.app.openai.files.objects import DeletedFile, FileList, FileObject
from tessera.app.openai.files.upload import FORM_SCHEMA, read_upload
from tessera.app.openai.pages import PageParameters, list_object
from tessera.engine.contract.errors import InvalidRequestError

PURPOSES = (*UPLOAD_PURPOSES, *OUTPUT_PURPOSES)
PAGES = PageParameters(max_limit=10_000, default_limit=10_000)
LIST_QUERY = {**PAGES.query, "purpose": {"type": "string", "enum": list(PURPOSES)}}

router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/files",
    operation_id="createFile",
    summary="Upload a file",
    openapi_extra=Description(returns=FileObject, form=FORM_SCHEMA),
)
async def create_file(http_request: Request) -> Response:
    files, tenant = files_of(http_request), tenant_of(http_request)
    async with read_upload(http_request, files, tenant, model_of(http_request).settings) as upload:
        created = await files.publish(tenant, upload.content, upload.filename, upload.purpose, upload.lifetime)
    return json_response(created)


@router.get(
    "/v1/files",
    operation_id="listFiles",
    summary="The files of an API key",
    openapi_extra=Description(returns=FileList, query=LIST_QUERY),
)
async def list_files(http_request: Request) -> Response:
    query = http_request.query_params
    purpose = query.get("purpose")
    if purpose is not None and purpose not in PURPOSES:
        raise InvalidRequestError(f"{purpose[:100]!r} is not one of {list(PURPOSES)} - 'purpose'", param="purpose")
    data, has_more = await files_of(http_request).page(tenant_of(http_request), PAGES.read(query), purpose)
    return json_response(list_object(data, has_more=has_more))


@router.get(
    "/v1/files/{file_id}",
    operation_id="retrieveFile",
    summary="A file's properties",
    openapi_extra=Description(returns=FileObject),
)
async def retrieve_file(http_request: Request, file_id: PathName) -> Response:
    return json_response(file_object(await files_of(http_request).find(tenant_of(http_request), file_id)))


@router.get(
    "/v1/files/{file_id}/content",
    operation_id="downloadFile",
    summary="A file's content",
    openapi_extra=Description(returns=None, statuses={200: "The bytes that were uploaded."}),
)
async def retrieve_content(http_request: Request, file_id: PathName) -> Response:
    files = files_of(http_request)
    stored = await files.find(tenant_of(http_request), file_id)
    # Never shown by a browser, whatever is in it.
    name = quote(file_object(stored)["filename"])
    headers = {"content-disposition": f"attachment; filename*=utf-8''{name}", "x-content-type-options": "nosniff"}
    return ContentResponse(await files.open(stored), headers)


@router.delete(
    "/v1/files/{file_id}",
    operation_id="deleteFile",
    summary="Delete a file",
    openapi_extra=Description(returns=DeletedFile),
)
async def delete_file(http_request: Request, file_id: PathName) -> Response:
    await files_of(http_request).delete(tenant_of(http_request), file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})
