package proc_test

import (
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/proc"
)

// Programs are written and run while others are started all the time.
func TestWrittenProgramRunsAtOnce(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	var writers sync.WaitGroup
	for i := range 4 * runtime.NumCPU() {
		writers.Go(func() {
			for j := range 50 {
				file := filepath.Join(dir, strconv.Itoa(i)+"-"+strconv.Itoa(j))
				if err := proc.WriteProgram(file, []byte("#!/bin/sh\n")); err != nil {
					t.Error(err)
					return
				}
				if err := exec.CommandContext(t.Context(), file).Run(); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	writers.Wait()
}
