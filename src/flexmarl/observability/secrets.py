"""Decides what must not be written down: secrets, by the name of their key and by the look of their text.

>>> masked("curl -H 'Authorization: Bearer abc.def'")
"curl -H 'Authorization: Bearer ***'"
>>> is_secret_key("HF_TOKEN"), is_secret_key("num_tokens"), is_secret_key("tokenizer")
(True, False, False)
"""

import re

MASK = "***"

# Counts of tokens are everywhere here, so "token" is a secret only as a key's last word.
_SECRET_KEY = re.compile(
    r"passw(or)?d|passphrase|secret|authorization|credential|cookie|(api|access|private)[-_ .]?key|token$",
    re.IGNORECASE,
)
_SECRET_TEXT = re.compile(
    r"(?i:(?P<keep>bearer\s+|(?:password|secret|token|api[-_]?key)(?:=|['\"]:\s*)))"
    r"(?:\"[^\"]*\"?|'[^']*'?|[^\s'\",;&)}]+)"
    r"|hf_[A-Za-z0-9]{8,}|(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{8,}"
)


def is_secret_key(key: str) -> bool:
    """Whether the value under this key is masked whatever it is."""
    return _SECRET_KEY.search(key) is not None


def masked(text: str) -> str:
    """The text without bearer tokens, `hf_...` and `sk-...` keys, and values of `password=...` or `'token': ...`."""
    return _SECRET_TEXT.sub(lambda match: (match["keep"] or "") + MASK, text) if _suspicious(text.lower()) else text


def _suspicious(text: str) -> bool:
    # A search for plain words is many times cheaper than the expression, and nearly always enough.
    if "hf_" in text or "sk-" in text or "bearer" in text:
        return True
    assigns = "=" in text or "':" in text or '":' in text
    return assigns and ("password" in text or "secret" in text or "token" in text or "key" in text)
