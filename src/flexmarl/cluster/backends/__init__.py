"""The cluster on real processes. In: specs of residents. Out: live processes that hold one object each."""
