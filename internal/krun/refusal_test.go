//go:build cgo && (linux || darwin)

package krun_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/krun"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

// A refusal is one way not to get a VM.
type refusal struct {
	change func(*krun.Sequence)
	// What is seen from outside: an error with errno, or a signal.
	errno  syscall.Errno
	signal syscall.Signal
	// words are on the library's log, or in the error.
	words []string
	// hide, if set, is what hideKVM puts in the place of the device.
	hide string
}

// start is the least VM, with what change adds to it. Its log is /dev/stderr.
func start(pair [2]string, change func(*krun.Sequence)) *krun.Sequence {
	s := &krun.Sequence{}
	s.Watch()
	s.Load(pair[0], pair[1])
	s.InitLog(2, krun.LogWarn)
	s.CreateContext()
	s.SetVMConfig(1, 128)
	s.DisableImplicitConsole()
	s.DisableImplicitVsock()
	s.AddVsock(krun.VsockPlain)
	s.SetRoot("/")
	s.SetExec("/bin/true", nil, nil)
	change(s)
	s.StartEnter()
	return s
}

func cases() map[string]refusal {
	type sequence = krun.Sequence
	return map[string]refusal{
		"missing disk": {change: func(s *sequence) { s.AddDisk3("d", "/no/such/disk", krun.Raw, true, false, krun.SyncNone) }, errno: syscall.EINVAL},
		"disk is a directory": {
			change: func(s *sequence) { s.AddDisk3("d", "/", krun.Raw, false, false, krun.SyncFull) }, errno: syscall.EINVAL,
		},
		"console on a closed file": {change: func(s *sequence) { s.AddVirtioConsoleDefault(krun.NoFile, 999, 999) }, signal: syscall.SIGABRT},
		"port on a closed file": {change: func(s *sequence) {
			s.AddVirtioConsoleMultiport()
			s.AddConsolePortInOut("iii.env", 999, 998)
		}, signal: syscall.SIGABRT},
		"multiport console without ports": {change: (*sequence).AddVirtioConsoleMultiport, signal: syscall.SIGABRT},
		"too many devices": {change: func(s *sequence) {
			for i := range 12 {
				s.AddDisk3(fmt.Sprint("d", i), os.Args[0], krun.Raw, true, false, krun.SyncNone)
			}
		}, errno: syscall.EINVAL},
		"oversized command line": {change: func(s *sequence) {
			s.SetExec("/bin/true", nil, []string{"A=" + strings.Repeat("x", 70_000)})
		}, signal: syscall.SIGABRT},
		"command line not of ASCII":   {change: func(s *sequence) { s.SetExec("/bin/true", nil, []string{"A=\u00e9"}) }, signal: syscall.SIGABRT},
		"newline in the command line": {change: func(s *sequence) { s.SetExec("/bin/true", []string{"a\nb"}, nil) }, signal: syscall.SIGABRT},
		"tiny memory":                 {change: func(s *sequence) { s.SetVMConfig(1, 16) }, signal: syscall.SIGABRT},
		"no memory":                   {change: func(s *sequence) { s.SetVMConfig(1, 0) }, errno: syscall.EINVAL},
		"no CPU":                      {change: func(s *sequence) { s.SetVMConfig(0, 128) }, errno: syscall.EINVAL},
		"second vsock device":         {change: func(s *sequence) { s.AddVsock(krun.VsockPlain) }, errno: syscall.EEXIST},
		"port of no console":          {change: func(s *sequence) { s.AddConsolePortInOut("iii.env", 0, 1) }, errno: syscall.EINVAL},
		"network without a file": {
			change: func(s *sequence) { s.AddNetUnixStream(krun.NoFile, [6]byte{2, 0, 0, 0, 0, 1}, 0, 0) }, errno: syscall.EINVAL,
		},
		"feature that is unknown": {change: func(s *sequence) { s.NeedFeature(1000, "it has no wings") }, words: []string{"it has no wings"}},
		"logger set up twice":     {change: func(s *sequence) { s.InitLog(2, krun.LogWarn) }, signal: syscall.SIGABRT},
		"ruleset that is none":    {change: func(s *sequence) { s.Confine(0, 0) }, words: []string{"confine the VMM with Landlock: "}},
		"no KVM device":           {hide: "nothing", signal: syscall.SIGABRT, words: []string{"Error(2)"}},
		"KVM device of others":    {hide: "others", signal: syscall.SIGABRT, words: []string{"Error(13)"}},
		"another KVM device":      {hide: "/dev/null", errno: syscall.EINVAL, words: []string{"KvmApiVersion"}},
		"no firmware":             {errno: syscall.ENOENT, words: []string{"libkrunfw"}},
	}
}

// outcome is how a child ended.
type outcome struct {
	state *os.ProcessState
	// report is what it said, err what that means.
	report []byte
	err    error
	log    string
	took   time.Duration
}

// run makes this program the child that makes the calls.
func run(t *testing.T, s *krun.Sequence, hide string) outcome {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var list, log bytes.Buffer
	if _, err := s.WriteTo(&list); err != nil {
		t.Fatal(err)
	}
	report, said, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = report.Close() }()
	cmd := exec.CommandContext(ctx, os.Args[0], krun.ChildCommand)
	// Kept open, as by a shim: the child ends with it.
	input, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Env, cmd.Stdout, cmd.Stderr = []string{}, &log, &log
	cmd.ExtraFiles = []*os.File{nil, nil, krun.ReportFile - 3: said}
	began := time.Now()
	if err := startHidden(cmd, hide); err != nil {
		t.Fatal(err)
	}
	_ = said.Close()
	_, _ = list.WriteTo(input) // one that is gone has said why
	words, _ := io.ReadAll(report)
	_ = cmd.Wait() // the outcome is in ProcessState
	return outcome{cmd.ProcessState, words, s.Refusal(words), log.String(), time.Since(began)}
}

// Each mistake ends as package shim/libkrun has to expect it: the call that is
// refused, or the signal, and never as a VM that ended well.
func TestRefusals(t *testing.T) {
	t.Parallel()
	whole := realPair(t)
	for _, name := range slices.Sorted(maps.Keys(cases())) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			want, pair := cases()[name], whole
			if want.hide != "" && (os.Geteuid() != 0 || runtime.GOOS != "linux") {
				t.Skip("SKIP: hiding /dev/kvm needs root on Linux")
			}
			if name == "no firmware" {
				pair[1] = ""
			}
			if want.change == nil {
				want.change = func(*krun.Sequence) {}
			}
			got := run(t, start(pair, want.change), want.hide)
			t.Logf("%v after %v: %v: %s", got.state, got.took.Round(time.Millisecond), got.err, strings.TrimSpace(got.log))
			status, _ := got.state.Sys().(syscall.WaitStatus)
			if want.signal != 0 && (!status.Signaled() || status.Signal() != want.signal || got.err != nil) {
				t.Errorf("it did not end by %v", want.signal)
			}
			if want.signal == 0 && (status.ExitStatus() != krun.StatusRefused || got.err == nil) {
				t.Error("it was not refused")
			}
			if known := (*krun.Error)(nil); want.errno != 0 && (!errors.As(got.err, &known) || !errors.Is(got.err, want.errno) || known.Meaning == "") {
				t.Errorf("no call answered with errno %d and a meaning", int(want.errno))
			}
			for _, word := range want.words {
				if !strings.Contains(got.log+fmt.Sprint(got.err), word) {
					t.Errorf("nobody says %q", word)
				}
			}
		})
	}
}

// realPair is the real library, fetched once into a cache of the tests.
func realPair(t *testing.T) [2]string {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Skipf("SKIP: no directory for the real libkrun: %v", err)
	}
	dir := filepath.Join(cache, "iii-sandbox-test")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	pair, err := vmassets.SetupLibkrun(t.Context(), vmassets.Options{
		Dir: dir, Log: slog.New(slog.DiscardHandler), Getenv: os.Getenv,
	})
	if err != nil {
		t.Skipf("SKIP: no real libkrun to test with: %v", err)
	}
	return [2]string{pair.Library, pair.Firmware}
}

// What the real library tells of itself.
func TestDescribe(t *testing.T) {
	t.Parallel()
	pair := realPair(t)
	describe := func(library, firmware string) (krun.Description, error) {
		s := &krun.Sequence{}
		s.Load(library, firmware)
		s.Describe()
		return s.Described(run(t, s, "").report)
	}
	d, err := describe(pair[0], pair[1])
	if err != nil {
		t.Fatal(err)
	}
	if !d.Has(krun.FeatureNet) || !d.Has(krun.FeatureBlk) || d.Has(63) {
		t.Errorf("its features are not those of a build with disks and network: %+v", d)
	}
	if slices.Contains(d.Missing, "krun_create_ctx") {
		t.Errorf("it lacks %q", d.Missing)
	}
	if _, err := describe("/no/libkrun.so.1", ""); err == nil || !strings.Contains(err.Error(), "load libkrun: /no/libkrun.so.1") {
		t.Errorf("a library that is not there: %v", err)
	}
}

func TestLoadSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("no library"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range [][3]string{
		{"/no/libkrun.so.1", "", "load libkrun: /no/libkrun.so.1"},
		{"libno-such-krun.so.1", "", "libno-such-krun.so.1"},
		{text, "", text},
		{"/no/libkrun.so.1", "/no/libkrunfw.so.5", "load libkrunfw: /no/libkrunfw.so.5"},
		{"libc.so.6", "", "libc.so.6 has no krun_init_log, krun_create_ctx"},
	} {
		if c[0] == "libc.so.6" && runtime.GOOS != "linux" {
			continue
		}
		got := run(t, start([2]string{c[0], c[1]}, func(*krun.Sequence) {}), "")
		if got.err == nil || !strings.Contains(got.err.Error(), c[2]) || got.state.ExitCode() != krun.StatusRefused {
			t.Errorf("%q: %v, error %v, want %q in it", c[:2], got.state, got.err, c[2])
		}
	}
}

// Lists as a broken parent might send them.
func TestChildRefusesBadLists(t *testing.T) {
	t.Parallel()
	for list, want := range map[string]string{
		"":                                    "there is none",
		"\x00\x00":                            "there is none",
		"\x00\x00\x00\x00":                    "does not start a VM",
		"\x00\x00\x00\x09watch":               "too long, or not whole",
		"\xff\xff\xff\xff":                    "too long, or not whole",
		"\x00\x00\x00\x05watch":               "ends within an argument",
		"\x00\x00\x00\x04fly\x00":             "the order is unknown",
		"\x00\x00\x00\x0dinit_log\x00two\x00": "is no number",
		"\x00\x00\x00\x0fset_exec\x00a\x00999\x00": "too many strings",
		"\x00\x00\x00\x0eset_exec\x00a\x00-1\x00":  "too many strings",
	} {
		report, said, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), os.Args[0], krun.ChildCommand)
		cmd.Stdin, cmd.ExtraFiles = strings.NewReader(list), []*os.File{nil, nil, krun.ReportFile - 3: said}
		err = cmd.Run()
		_ = said.Close()
		words, _ := io.ReadAll(report)
		_ = report.Close()
		if got := (&krun.Sequence{}).Refusal(words); err == nil || cmd.ProcessState.ExitCode() != krun.StatusRefused || got == nil || !strings.Contains(got.Error(), want) {
			t.Errorf("%q: %v, error %v, want %q", list, cmd.ProcessState, got, want)
		}
	}
}

// Started by hand it says whose it is.
func TestChildWithoutAParent(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), os.Args[0], krun.ChildCommand)
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "is for krun-shim itself") {
		t.Errorf("%v: %s", err, out)
	}
}
