package main

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/test/bench/sequence"
)

// The probe starts itself for the pipe test; here that is this test program.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "sink" {
		main()
		return
	}
	os.Exit(m.Run())
}

func TestFork(t *testing.T) {
	t.Parallel()
	program, err := exec.LookPath("true")
	if err != nil {
		t.Skip("SKIPPED: no program true")
	}
	var out bytes.Buffer
	if err := command([]string{"fork", "3", program}, nil, &out); err != nil {
		t.Fatal(err)
	}
	lines := strings.Fields(out.String())
	if len(lines) != 3 {
		t.Fatalf("got %q", lines)
	}
	for _, l := range lines {
		if ns, err := strconv.Atoi(l); err != nil || ns <= 0 {
			t.Errorf("%q is no time", l)
		}
	}
	if err := command([]string{"fork", "1", "/nonexistent"}, nil, &out); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

func TestStreams(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := command([]string{"source", "100000"}, nil, &out); err != nil {
		t.Fatal(err)
	}
	if err := sequence.Check(bytes.NewReader(out.Bytes()), 100000); err != nil {
		t.Error(err)
	}
	if err := command([]string{"sink", "100000"}, bytes.NewReader(out.Bytes()), nil); err != nil {
		t.Error(err)
	}
	if err := command([]string{"sink", "100001"}, bytes.NewReader(out.Bytes()), nil); err == nil {
		t.Error("a short stream passed")
	}
	out.Reset()
	if err := command([]string{"pipe", "1000000"}, nil, &out); err != nil {
		t.Fatal(err)
	}
	if ns, err := strconv.Atoi(strings.TrimSpace(out.String())); err != nil || ns <= 0 {
		t.Errorf("%q is no time", out.String())
	}
}

func TestUsage(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{nil, {"fork"}, {"fork", "x", "true"}, {"fork", "1"}, {"dance", "1"}} {
		if err := command(args, nil, &bytes.Buffer{}); err == nil {
			t.Errorf("%q passed", args)
		}
	}
}
