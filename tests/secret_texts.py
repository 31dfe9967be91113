"""Texts that hold a secret, for the law that no secret is written or printed."""

from hypothesis import strategies as st

SECRET = "TOPSECRET5f3a9c"
"""Is in every text of `secret_texts`."""
secret_texts = st.sampled_from(
    [f"Bearer {SECRET}", f"bearer  {SECRET}", f"hf_{SECRET}", f"sk-{SECRET}", f"sk-proj-{SECRET}", f"api_key={SECRET}",
     f"HF_TOKEN='{SECRET} {SECRET}'", repr({"password": SECRET}), f"\nhf_{SECRET}", f"?access_token={SECRET}&x=1"]
)  # fmt: skip
