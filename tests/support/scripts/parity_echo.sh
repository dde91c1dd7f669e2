#!/bin/sh
# Says its rank on both streams; lines with certain words are copied by the filters.
echo "out $RANK"
echo "loss $RANK"
echo "err $RANK" >&2
test -z "$1" || printf 'no end'
