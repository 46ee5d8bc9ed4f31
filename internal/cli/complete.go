package cli

import (
	"os"
	"slices"

	"github.com/spf13/cobra"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/catalog"
)

// completeNothing turns file name completion off for the flags that take none.
func completeNothing(cmd *cobra.Command) {
	for _, flag := range []string{"code", "cpus", "memory", "env", "timeout", "name", "idle-timeout"} {
		_ = cmd.RegisterFlagCompletionFunc(flag, cobra.NoFileCompletions)
	}
}

// completeImages offers the presets and the layouts of the image folder.
func (a *App) completeImages(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	var names []string
	for _, image := range catalog.Presets() {
		names = append(names, image.Name)
	}
	roots, err := a.roots()
	if err != nil {
		return names, cobra.ShellCompDirectiveNoFileComp
	}
	entries, _ := os.ReadDir(a.imageLayouts(roots))
	for _, entry := range entries {
		if name := entry.Name(); a.hasLayout(roots, name) && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// completeSandboxes offers the ids and names of the kept sandboxes.
func (a *App) completeSandboxes(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if cmd.Name() == "exec" && len(args) > 0 {
		return nil, cobra.ShellCompDirectiveDefault
	}
	sys, err := a.system()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	kept, err := sys.manager.List(cmd.Context())
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var keys []string
	for _, k := range kept {
		keys = append(keys, k.ID+"\t"+k.Image)
		if k.Name != "" {
			keys = append(keys, k.Name+"\t"+k.Image)
		}
	}
	return keys, cobra.ShellCompDirectiveNoFileComp
}
