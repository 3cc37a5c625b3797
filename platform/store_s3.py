"""A store in a bucket: the methods of `LocalFiles` over S3 or anything that speaks it.

Address, region and credentials come from where every AWS program takes them (AWS_ENDPOINT_URL, AWS_PROFILE, ~/.aws, the
machine's role); none is kept or written. The server must honour conditional writes (If-None-Match, If-Match), as AWS
does since November 2024: leases rest on them, and `create` is tried once to see that it does.

A server that does not answer is asked again, less and less often, for `patience_s`; whoever asked waits.
"""

from __future__ import annotations

import random
import re
import secrets
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any

from depthlaw.platform.store_files import StoreError

ADDRESS = re.compile(r"s3:/{1,2}([a-z0-9][a-z0-9.-]+)(?:/+(.*?))?/*")  # one slash is what `Path` leaves of two
_PASSING = {"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "503", "500", "502", "504", "429",
            "Throttling", "RequestTimeTooSkewed", "ConditionalRequestConflict", "OperationAborted"}  # fmt: skip
_REFUSED = {"PreconditionFailed", "412"}
_ABSENT = {"NoSuchKey", "404", "NotFound"}
# Between two tries; far below the TTL of leases, for an owner must be heard in time once the server is back.
LONGEST_PAUSE_S = 10.0


class S3Files:
    """Objects under a prefix. Raises StoreError where the server refuses, or does not answer in time."""

    def __init__(self, address: str, patience_s: float) -> None:
        match = ADDRESS.fullmatch(address)
        if not match:
            raise StoreError(f"{address} is not the address of a bucket: write s3://bucket/prefix")
        self.bucket, prefix = match[1], match[2]
        self.root = f"s3://{self.bucket}" + (f"/{prefix}" if prefix else "")
        self.prefix = f"{prefix}/" if prefix else ""
        self.patience_s = patience_s
        self._made: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_made": None}  # each process opens its own connections

    def kind(self) -> str:
        found = self._call("list_objects_v2", Prefix=self.prefix, MaxKeys=1)
        return "folder" if found.get("Contents") else "missing"

    def listing(self, prefix: str) -> tuple[list[str], list[str]]:
        base = f"{self.prefix}{prefix}/"
        folders: list[str] = []
        files: list[str] = []
        for page in self._pages(base):
            folders += [one["Prefix"][len(base) : -1] for one in page.get("CommonPrefixes", [])]
            files += [one["Key"][len(base) :] for one in page.get("Contents", [])]
        return sorted(folders), sorted(name for name in files if name)

    def _pages(self, base: str) -> Iterator[dict[str, Any]]:
        more: dict[str, Any] = {}
        while True:
            page = self._call("list_objects_v2", Prefix=base, Delimiter="/", **more)
            yield page
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def has_folder(self, prefix: str) -> bool:
        return bool(self._call("list_objects_v2", Prefix=f"{self.prefix}{prefix}/", MaxKeys=1).get("Contents"))

    def exists(self, key: str) -> bool:
        return self._call("head_object", Key=self.prefix + key, absent=True) is not None

    def read(self, key: str) -> bytes:
        return self._get(key)[0]

    def _get(self, key: str) -> tuple[bytes, str]:
        found = self._call("get_object", Key=self.prefix + key, absent=True)
        if found is None:
            raise FileNotFoundError(f"{self.root}/{key} is not there")
        return found["Body"], found["ETag"]

    def write(self, key: str, data: bytes) -> None:
        self._call("put_object", Key=self.prefix + key, Body=data)

    def delete(self, key: str) -> None:
        self._call("delete_object", Key=self.prefix + key)

    def remove_empty(self, prefix: str) -> None:
        """There are no folders to remove."""

    def create(self, key: str, data: bytes) -> bool:
        if self._call("put_object", Key=self.prefix + key, Body=data, IfNoneMatch="*", refused=True):
            return True
        # An answer that was lost was asked for again, and that met what the first time had put there.
        return self._holds(key, data)

    def swap(self, key: str, old: bytes, new: bytes) -> bool:
        try:
            data, tag = self._get(key)
        except FileNotFoundError:
            return False
        if data != old:
            return False
        done = self._call("put_object", Key=self.prefix + key, Body=new, IfMatch=tag, refused=True, absent=True)
        return bool(done) or self._holds(key, new)

    def _holds(self, key: str, data: bytes) -> bool:
        try:
            return self.read(key) == data
        except FileNotFoundError:
            return False

    def check_conditional_writes(self) -> None:
        """Raises StoreError if the server ignores the conditions that leases rest on."""
        key = f"leases/.{secrets.token_hex(8)}.probe"
        try:
            honoured = self.create(key, b"1") and not self.create(key, b"2") and self.swap(key, b"1", b"3")
            other = '"00000000000000000000000000000000"'  # the tag of something else
            stale = self._call("put_object", Key=self.prefix + key, Body=b"4", IfMatch=other, refused=True)
            honoured = honoured and stale is None
        finally:
            self.delete(key)
        if not honoured:
            raise StoreError(
                f"{self.root} is on a server that ignores If-None-Match or If-Match: two sweeps could run one trial. "
                "Use a server that honours them, or a folder"
            )

    def ages(self, prefix: str) -> dict[str, float]:
        base, ages = f"{self.prefix}{prefix}/", {}
        for page in self._pages(base):
            now = parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
            for one in page.get("Contents", []):
                ages[one["Key"][len(base) :]] = max(0.0, (now - one["LastModified"]).total_seconds())
        return ages

    def hidden(self, older_than_s: float) -> list[str]:
        """An object is there whole or not at all: nobody leaves half of one."""
        return []

    def _call(self, operation: str, *, absent: bool = False, refused: bool = False, **options: Any) -> Any:
        """The answer; None where the object is not there, or the condition not met, and the caller allows for it."""
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

        began, pause = time.monotonic(), 0.2
        while True:
            try:
                answer = getattr(self._client(), operation)(Bucket=self.bucket, **options)
                if "Body" in answer:
                    answer["Body"] = answer["Body"].read()
                return answer
            except (NoCredentialsError, PartialCredentialsError) as error:
                raise StoreError(
                    f"cannot use {self.root}: {error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
                ) from error
            except ClientError as error:
                code = error.response["Error"]["Code"]
                if (code in _ABSENT and absent) or (code in _REFUSED and refused):
                    return None
                if code not in _PASSING:
                    raise StoreError(f"{self.root} refused {operation}: {code}, {_message(error)}") from OSError(code)
                reason = code
            except BotoCoreError as error:  # no answer, or half of one
                reason = str(error)
            if time.monotonic() - began > self.patience_s:
                raise StoreError(
                    f"{self.root} does not answer after {self.patience_s:.0f} s of trying: {reason}"
                ) from OSError(reason)
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _client(self) -> Any:
        if self._made is None:
            try:
                from botocore.config import Config
                from botocore.session import get_session
            except ImportError:
                raise StoreError(f"{self.root} needs botocore: pip install 'depthlaw[s3]'") from None
            options = Config(connect_timeout=5, read_timeout=60, retries={"total_max_attempts": 1})
            self._made = get_session().create_client("s3", config=options)
        return self._made


def _message(error: Any) -> str:
    return " ".join(str(error.response["Error"].get("Message", "")).split())[:200]
