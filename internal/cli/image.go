package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/catalog"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/imagestore"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
)

func (a *App) imageCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "image",
		Short: "Manage the images on this host",
		Args:  noSuchCommand,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.imagePullCommand(), a.imageLsCommand(), a.imageRmCommand(), a.imageGCCommand())
	return cmd
}

// withImages runs f with the store, ended by signals.
func (a *App) withImages(ctx context.Context, f func(context.Context, *imagestore.Store) error) error {
	roots, err := a.roots()
	if err != nil {
		return err
	}
	store, err := a.images(roots)
	if err != nil {
		return err
	}
	ctx, caught := catchInterrupts(ctx)
	defer caught.Close()
	return interruptedOr(ctx, f(ctx, store))
}

func (a *App) imagePullCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "pull IMAGE...",
		Short: "Fetch images, or what is new of them",
		Long: `pull fetches images: python, node, oci:DIR[:TAG], docker-archive:FILE or a registry
reference with its host. An image that has a layout in III_SANDBOX_IMAGE_DIR comes from
there. It prints each image's digest.`,
		ValidArgsFunction: a.completeImages,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef("name an image to pull")
			}
			return a.withImages(cmd.Context(), func(ctx context.Context, store *imagestore.Store) error {
				for _, name := range args {
					if err := a.pull(ctx, store, name); err != nil {
						return err
					}
				}
				return nil
			})
		},
	}
}

func (a *App) pull(ctx context.Context, store *imagestore.Store, name string) error {
	roots, err := a.roots()
	if err != nil {
		return err
	}
	image, err := catalog.ResolveDirect(name, func(name string) bool { return a.hasLayout(roots, name) })
	if err != nil {
		return err
	}
	progress := newProgress(a.Stderr, a.Terminal(a.Stderr))
	pulled, err := store.Pull(ctx, image.Ref, imagestore.EnsureOptions{Name: image.Name, Progress: progress.Update})
	progress.Close()
	if err != nil {
		return err
	}
	if err := pulled.Close(); err != nil {
		return err
	}
	_, err = fmt.Fprintln(a.Stdout, pulled.Digest)
	return err
}

func (a *App) imageLsCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List the images on this host",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withImages(cmd.Context(), func(ctx context.Context, store *imagestore.Store) error {
				entries, err := store.List(ctx)
				if err != nil {
					return err
				}
				images, err := a.named(entries)
				if err != nil {
					return err
				}
				if asJSON {
					return a.printJSON(images)
				}
				return a.printImages(images)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// listedImage is an image as image ls prints it.
type listedImage struct {
	imagestore.Entry
	// Names has the catalog name for each of Refs, "" where it has none.
	Names []string `json:"names"`
}

func (a *App) named(entries []imagestore.Entry) ([]listedImage, error) {
	roots, err := a.roots()
	if err != nil {
		return nil, err
	}
	images := make([]listedImage, len(entries))
	for i, e := range entries {
		images[i] = listedImage{e, make([]string, len(e.Refs))}
		for j, ref := range e.Refs {
			images[i].Names[j] = a.catalogName(roots, ref)
		}
	}
	return images, nil
}

// catalogName is the name by which run --image finds what a reference stands for:
// a layout of the image folder, or a preset; "" where there is none.
func (a *App) catalogName(roots layout.Roots, ref string) string {
	if path, local := strings.CutPrefix(ref, "oci:"); local {
		name := filepath.Base(path)
		dir, err := filepath.Abs(filepath.Join(a.imageLayouts(roots), name))
		if err == nil && dir == path && a.hasLayout(roots, name) {
			return name
		}
	}
	for _, preset := range catalog.Presets() {
		if preset.Ref == ref && !a.hasLayout(roots, preset.Name) {
			return preset.Name
		}
	}
	return ""
}

func (a *App) printImages(images []listedImage) error {
	table := tabwriter.NewWriter(a.Stdout, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(table, "NAME\tREFERENCE\tDIGEST\tSIZE\tPULLED\tIN USE")
	for _, e := range images {
		refs, names := e.Refs, e.Names
		if len(refs) == 0 {
			refs, names = []string{"-"}, []string{""}
		}
		for i, ref := range refs {
			_, _ = fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\n", cmp.Or(names[i], "-"), ref, shortDigest(e.Digest), mib(e.Size), e.Pulled.Local().Format(time.DateTime), yesNo(e.InUse))
		}
	}
	return table.Flush()
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// shortDigest cuts a digest to what a person compares: "sha256:" and 12 digits.
func shortDigest(digest string) string { return digest[:min(len(digest), len("sha256:")+12)] }

func (a *App) imageRmCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "rm IMAGE...",
		Short: "Remove images by name, reference or digest",
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef("name an image to remove: see adapter image ls")
			}
			roots, err := a.roots()
			if err != nil {
				return err
			}
			return a.withImages(cmd.Context(), func(ctx context.Context, store *imagestore.Store) error {
				for _, ref := range args {
					err := store.Remove(ctx, a.storeName(roots, ref))
					if errors.Is(err, imagestore.ErrNotCached) {
						// Its own advice is for who wanted to run the image.
						return fmt.Errorf("image %s is not in the store: see adapter image ls", ref)
					}
					if err != nil {
						return err
					}
				}
				return nil
			})
		},
	}
}

// storeName is what the store knows an image by: the reference of a preset, and
// anything else as it is, the name of a layout in the image folder too.
func (a *App) storeName(roots layout.Roots, name string) string {
	for _, preset := range catalog.Presets() {
		if preset.Name == name && !a.hasLayout(roots, name) {
			return preset.Ref
		}
	}
	return name
}

func (a *App) imageGCCommand() *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "gc",
		Short: "Remove images that nothing refers to",
		Long: `gc removes images whose reference has moved on to a newer one, and what broken pulls
left. With --all it removes every image that no VM uses.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withImages(cmd.Context(), func(ctx context.Context, store *imagestore.Store) error {
				result, err := store.GC(ctx, imagestore.GCOptions{All: all})
				if err != nil {
					return err
				}
				_, err = fmt.Fprintf(a.Stdout, "removed %d images, freed %s\n", len(result.Removed), mib(result.Freed))
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "remove also what a reference still names")
	return cmd
}
