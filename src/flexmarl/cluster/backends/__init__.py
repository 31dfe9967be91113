"""Where workers really run. In: worker specs. Out: live processes that hold one object each."""
