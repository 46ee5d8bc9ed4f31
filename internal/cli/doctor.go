package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/selftest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

func (a *App) doctorCommand() *cobra.Command {
	var asJSON, boot bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check what VMs need on this host, and say how to mend it",
		Long: `doctor checks what VMs need on this host and prints what it found and what to do
about it: what must be done ("FAIL") or would make VMs faster or easier ("note"). It
exits with 1 when no VM can boot; with --vmm, when none of that kind can.

With --boot it also boots a VM, streams 1 MiB into it and back, and ends it.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			findings := a.diagnose(cmd)
			if boot {
				findings = append(findings, a.tryBoot(cmd.Context()))
			}
			ready := true
			for _, f := range findings {
				ready = ready && f.OK
			}
			if err := a.printFindings(findings, asJSON); err != nil {
				return err
			}
			if !ready {
				return &exitError{code: ExitFault}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().BoolVar(&boot, "boot", false, "boot a VM too, and stream through its link")
	return cmd
}

// bootWait bounds the VM of a check: one that is emulated, on a busy host, boots in
// less.
const bootWait = 3 * time.Minute

// tryBoot boots a VM.
func (a *App) tryBoot(ctx context.Context) vmassets.Finding {
	ctx, cancel := context.WithTimeoutCause(ctx, bootWait, fmt.Errorf("it was not done after %v", bootWait))
	defer cancel()
	f := vmassets.Finding{Name: "boot"}
	result, err := a.selfTest(ctx)
	if err != nil {
		f.Finding = err.Error()
		f.Fix = "mend first what else fails; docs/debugging.md tells how to boot the same VM by hand"
		return f
	}
	f.OK = true
	f.Finding = fmt.Sprintf("a VM was up after %d ms; 1 MiB went in within %d ms and came back within %d ms",
		result.Boot.Milliseconds(), result.In.Milliseconds(), result.Out.Milliseconds())
	return f
}

func (a *App) selfTest(ctx context.Context) (selftest.Result, error) {
	roots, err := a.roots()
	if err != nil {
		return selftest.Result{}, err
	}
	launcher, _, err := a.machinery(roots, a.logger())
	if err != nil {
		return selftest.Result{}, err
	}
	return selftest.Run(ctx, launcher, roots.VMM())
}

func (a *App) diagnose(cmd *cobra.Command) []vmassets.Finding {
	roots, err := a.roots()
	if err != nil {
		return []vmassets.Finding{{Name: "directories", Finding: err.Error()}}
	}
	findings := append(vmassets.Diagnose(cmd.Context(), roots.VMM(), a.vmm, a.Getenv), directories(roots))
	// The flag was checked when it was read.
	vmm := a.vmm
	if err := (*vmmFlag)(&vmm).Set(vmm); err != nil && vmm != "" {
		findings = append(findings, vmassets.Finding{Name: "III_SANDBOX_VMM", Finding: fmt.Sprintf("%q is unknown", vmm), Fix: err.Error()})
	}
	images := vmassets.Finding{Name: "images", OK: true, Finding: a.imageLayouts(roots)}
	names, _ := a.completeImages(nil, nil, "")
	for _, name := range names {
		if a.hasLayout(roots, name) {
			images.Finding += ", " + name
		}
	}
	if !a.hasLayout(roots, "python") {
		images.Fix = "make images builds python and node from Debian packages; without them they are pulled"
	}
	return append(findings, images)
}

func directories(roots layout.Roots) vmassets.Finding {
	f := vmassets.Finding{Name: "directories"}
	for _, dir := range []string{roots.Cache, roots.State, roots.Run} {
		if err := layout.MakePrivate(dir); err != nil {
			f.Finding = err.Error()
			f.Fix = "set III_SANDBOX_CACHE_DIR, III_SANDBOX_STATE_DIR and III_SANDBOX_RUN_DIR to directories of yours"
			return f
		}
	}
	if err := roots.Machine("00000000-0000-0000-0000-000000000000").CheckSocket(); err != nil {
		f.Finding = err.Error()
		return f
	}
	f.OK = true
	f.Finding = fmt.Sprintf("cache %s, state %s, run %s", roots.Cache, roots.State, roots.Run)
	return f
}

// indented has the further lines of a finding below its first.
func indented(text string) string { return strings.ReplaceAll(text, "\n", "\n      ") }

func (a *App) printFindings(findings []vmassets.Finding, asJSON bool) error {
	if asJSON {
		type finding struct {
			Name    string `json:"name"`
			OK      bool   `json:"ok"`
			Finding string `json:"finding"`
			Fix     string `json:"fix,omitempty"`
		}
		list := []finding{}
		for _, f := range findings {
			list = append(list, finding(f))
		}
		return a.printJSON(list)
	}
	for _, f := range findings {
		mark := "ok  "
		switch {
		case !f.OK:
			mark = "FAIL"
		case f.Fix != "":
			mark = "note"
		}
		if _, err := fmt.Fprintf(a.Stdout, "%s  %s: %s\n", mark, f.Name, indented(f.Finding)); err != nil {
			return err
		}
		if f.Fix != "" {
			if _, err := fmt.Fprintf(a.Stdout, "      -> %s\n", f.Fix); err != nil {
				return err
			}
		}
	}
	return nil
}
