package cli

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

func (a *App) vmmCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "vmm",
		Short: "Manage what boots the VMs",
		Args:  noSuchCommand,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.vmmSetupCommand())
	return cmd
}

func (a *App) vmmSetupCommand() *cobra.Command {
	var update, quiet, libkrun bool
	cmd := &cobra.Command{
		Use:   "setup",
		Short: "Fetch what boots VMs into the cache",
		Long: `setup fetches Debian's cloud kernel with apt-get, as the user you are, and unpacks it
into the cache; nothing is installed. III_VM_KERNEL names a kernel of your own instead.
With a kernel there already it does nothing.

With --libkrun it fetches libkrun and its kernel instead, for hosts with hardware
virtualization: with npm pack, checked against checksums that this build knows. It
does nothing where the host has them (III_LIBKRUN_PATH, beside the adapter, system).`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			roots, err := a.roots()
			if err != nil {
				return err
			}
			progress := a.Stderr
			if quiet {
				progress = io.Discard
			}
			ctx, caught := catchInterrupts(cmd.Context())
			defer caught.Close()
			options := vmassets.Options{
				Dir: roots.VMM(), Log: a.logger(), Progress: progress, Getenv: a.Getenv, Update: update,
			}
			if libkrun {
				pair, err := vmassets.SetupLibkrun(ctx, options)
				if err != nil {
					return interruptedOr(ctx, err)
				}
				_, err = fmt.Fprintf(a.Stdout, "%s is ready, its kernel is in %s\n", pair.Library, pair.Firmware)
				return err
			}
			kernel, err := vmassets.Setup(ctx, options)
			if err != nil {
				return interruptedOr(ctx, err)
			}
			_, err = fmt.Fprintf(a.Stdout, "kernel %s is ready\n", kernel.Release)
			return err
		},
	}
	cmd.Flags().BoolVar(&libkrun, "libkrun", false, "fetch libkrun and its kernel, for hosts with hardware virtualization")
	cmd.Flags().BoolVar(&update, "update", false, "look for a newer kernel")
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "print no steps")
	return cmd
}
