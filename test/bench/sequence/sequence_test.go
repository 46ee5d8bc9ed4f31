package sequence_test

import (
	"bytes"
	"io"
	"testing"
	"testing/iotest"

	"github.com/iii-hq/workers/sandbox-libkrun/test/bench/sequence"
)

func TestCheck(t *testing.T) {
	t.Parallel()
	const n = 200_003
	good, err := io.ReadAll(io.LimitReader(sequence.New(), n))
	if err != nil {
		t.Fatal(err)
	}
	if err := sequence.Check(iotest.OneByteReader(bytes.NewReader(good)), n); err != nil {
		t.Error(err)
	}
	for name, data := range map[string][]byte{
		"changed": append(append(bytes.Clone(good[:70_000]), good[70_000]^1), good[70_001:]...),
		"lost":    append(bytes.Clone(good[:32<<10]), good[33<<10:]...),
		"doubled": append(bytes.Clone(good[:64<<10]), good[32<<10:]...),
		"short":   good[:n-1],
		"long":    append(bytes.Clone(good), 0),
	} {
		if sequence.Check(bytes.NewReader(data), n) == nil {
			t.Errorf("%s passed", name)
		}
	}
}
