"""What commands are made of, for hypothesis: words, tokens and rows that a line can carry."""

from hypothesis import strategies as st

words = st.text(
    st.characters(codec="utf-8", exclude_characters=" \n\r", exclude_categories=["Zs", "Cc"]),
    min_size=1,
    max_size=20,
)
tokens = st.integers(-(2**63) + 1, 2**63 - 1)
rows = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=10,
)
