package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/krun"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim/libkrun"
)

// newLibkrun runs VMs in a child that is this program once more.
func newLibkrun(log *slog.Logger) libkrun.Hypervisor {
	// By this link the running program is found even if its file was replaced.
	h := libkrun.Hypervisor{Command: "/proc/self/exe"}
	if runtime.GOOS != "linux" {
		self, err := os.Executable()
		if err != nil {
			log.Warn("find this program", "error", err)
		}
		h.Command = self
	}
	if canConfine(log) {
		h.Confine = libkrunRuleset
	}
	return h
}

// describeTimeout bounds the loading of a library.
const describeTimeout = 10 * time.Second

// describeLibkrun prints in one line what a libkrun can do, for doctor: whether
// it loads at all is known to nobody before.
func describeLibkrun(args []string, stdout io.Writer, log *slog.Logger) error {
	if len(args) != 2 {
		return errors.New(commandDescribe + ": want LIBRARY FIRMWARE")
	}
	calls := &krun.Sequence{}
	calls.Watch() // a library that hangs ends with this process
	calls.Load(args[0], args[1])
	calls.Describe()
	var list bytes.Buffer
	if _, err := calls.WriteTo(&list); err != nil {
		return err
	}
	report, said, err := os.Pipe()
	if err != nil {
		return err
	}
	defer func() { _ = report.Close() }() // only read
	ctx, cancel := context.WithTimeout(context.Background(), describeTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, newLibkrun(log).Command, krun.ChildCommand)
	input, err := cmd.StdinPipe() // open for as long as the child runs
	if err != nil {
		return errors.Join(err, said.Close())
	}
	var output bytes.Buffer
	cmd.Env, cmd.Stdout, cmd.Stderr = []string{}, &output, &output
	cmd.ExtraFiles = []*os.File{krun.ReportFile - 3: said}
	err = cmd.Start()
	_ = said.Close() // the child has its own
	if err != nil {
		return err
	}
	_, _ = list.WriteTo(input) // one that is gone has said why
	runErr := cmd.Wait()
	words, _ := io.ReadAll(io.LimitReader(report, krun.MaxReport))
	if len(words) == 0 {
		return fmt.Errorf("load libkrun: %w %s", runErr, bytes.TrimSpace(output.Bytes()))
	}
	d, err := calls.Described(words)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(stdout, abilities(d))
	return err
}

// abilities is what a user wants to know of a library.
func abilities(d krun.Description) string {
	has := map[bool]string{true: "with", false: "without"}
	text := fmt.Sprintf("built %s disks and %s network devices", has[d.Has(krun.FeatureBlk)], has[d.Has(krun.FeatureNet)])
	if len(d.Missing) > 0 {
		text += ", lacks " + strings.Join(d.Missing, ", ")
	}
	return text
}

// errNoChild is what the command of a child comes to that is not caught before:
// that takes C, and no more arguments.
func errNoChild() error {
	return errors.New(krun.ChildCommand + " is for krun-shim itself, which takes one built with cgo: if its shim says this, build it with CGO_ENABLED=1")
}
