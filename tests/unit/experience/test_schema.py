import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flexmarl.errors import StoreError
from flexmarl.experience.interface import Column, ColumnKind
from flexmarl.experience.schema import CODECS, decode, encode, quote

DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"),
    hnp.complex_number_dtypes(),
    hnp.datetime64_dtypes(),
    hnp.byte_string_dtypes(),
    hnp.array_dtypes(max_size=3),
)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


def through(kind: ColumnKind, value):
    return decode(kind, encode("solver", Column("it", kind), value))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_tensor_of_any_type_and_shape_comes_back_bit_by_bit(data):
    array = np.array(data.draw(hnp.arrays(data.draw(DTYPES), data.draw(SHAPES))))
    back = through(ColumnKind.TENSOR, array)
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert back.flags.writeable
    assert back.flags.aligned


def test_a_view_comes_back_as_what_it_shows():
    array = np.arange(24).reshape(2, 3, 4)
    for view in (array.T, array[:, ::2], np.asfortranarray(array), np.broadcast_to(np.float32(1), (2, 2))):
        np.testing.assert_array_equal(through(ColumnKind.TENSOR, view), view, strict=True)


@settings(max_examples=200, deadline=None)
@given(PLAIN)
def test_plain_values_come_back_equal(value):
    assert through(ColumnKind.JSON, value) == value


@given(st.floats(allow_nan=False), st.integers(-(2**63), 2**63 - 1), st.booleans())
def test_numbers_come_back_equal_and_of_their_type(real, whole, truth):
    assert through(ColumnKind.FLOAT, real) == real
    assert through(ColumnKind.INT, whole) == whole
    assert through(ColumnKind.BOOL, truth) is truth
    assert through(ColumnKind.FLOAT, np.float32(0.1)) == float(np.float32(0.1))
    assert type(through(ColumnKind.INT, np.int32(4))) is int


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (ColumnKind.INT, 1.0, "does not take 1.0; it takes an integer"),
        (ColumnKind.INT, True, "does not take True"),
        (ColumnKind.INT, 2**63, "64 bits"),
        (ColumnKind.FLOAT, float("nan"), "does not take nan; it takes a number that is not NaN"),
        (ColumnKind.FLOAT, "0.5", "does not take '0.5'"),
        (ColumnKind.FLOAT, 2**53 + 1, "does not take 9007199254740993"),
        (ColumnKind.FLOAT, 10**400, "does not take 10000"),
        (ColumnKind.BOOL, 1, "it takes True or False"),
        (ColumnKind.TEXT, b"bytes", "it takes a string"),
        (ColumnKind.TEXT, "\ud800", "UTF-8"),
        (ColumnKind.JSON, {1: 2}, "it would come back as"),
        (ColumnKind.JSON, (1, 2), "it would come back as"),
        (ColumnKind.JSON, float("inf"), "finite numbers"),
        (ColumnKind.JSON, np.zeros(2), "it takes lists and dicts"),
        (ColumnKind.TENSOR, [1, 2], "it takes a numpy array"),
        (ColumnKind.TENSOR, np.array([object()]), "dtype object"),
        (ColumnKind.TENSOR, None, "does not take None"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place_and_what_works(kind, value, words):
    with pytest.raises(StoreError) as refusal:
        encode("solver", Column("it", kind), value)
    assert str(refusal.value).startswith(f"table 'solver', column 'it': {kind} does not take ")
    assert words in str(refusal.value)


def test_numbers_and_words_are_by_value_and_the_rest_by_reference():
    by_value = {kind for kind, codec in CODECS.items() if not codec.by_reference}
    assert by_value == {ColumnKind.INT, ColumnKind.FLOAT, ColumnKind.BOOL, ColumnKind.WORD}
    assert CODECS.keys() == set(ColumnKind)


def test_a_name_is_quoted_whatever_it_holds():
    assert quote('x" (y); DROP TABLE z; --') == '"x"" (y); DROP TABLE z; --"'
