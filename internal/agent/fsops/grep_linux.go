package fsops

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent/rexp"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// GrepOptions is a search.
type GrepOptions struct {
	// Path is a file, a directory, or a link to one of them.
	Path string
	// Pattern is a regular expression in Rust's syntax.
	Pattern string
	// Recursive walks a directory, without it a directory is refused.
	Recursive  bool
	IgnoreCase bool
	// Include and Exclude are gitignore patterns relative to Path.
	Include, Exclude []string
	// MaxMatches ends the search once it is reached; 0 does not.
	MaxMatches uint64
	// MaxLineBytes cuts longer lines at the last character that fits, and marks
	// that with "…"; 0 does not.
	MaxLineBytes uint64
}

// Match is a line that matches.
type Match struct {
	// Path is the root as given, with the file's path below it.
	Path string
	// Line counts from 1.
	Line uint64
	// Content is the line, or a piece of it of at most MaxPiece bytes; Continued
	// then tells that the next Match has more of it. It is valid during the call.
	Content   []byte
	Continued bool
}

// MaxPiece is the longest Match.Content in bytes.
const MaxPiece = 256 << 10

// binaryProbe is how much of a file is looked at for a NUL.
const binaryProbe = 8192

// Grep calls emit with the lines that match, in the order of their files' paths
// as bytes, and reports whether it stopped at MaxMatches. Memory does not grow
// with the number of files or the length of lines. Binary files and lines that
// are not UTF-8 are passed over, below a directory also what cannot be read.
func Grep(ctx context.Context, opts GrepOptions, emit func(Match) error) (truncated bool, err error) {
	abs, err := resolve(opts.Path)
	if err != nil {
		return false, err
	}
	if _, err := statAt(unix.AT_FDCWD, abs, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return false, fault.FileErrno(opts.Path, err)
	}
	g := grepping{ctx: ctx, opts: opts, emit: emit}
	if g.re, err = rexp.Compile(opts.Pattern, rexp.Options{IgnoreCase: opts.IgnoreCase, Ended: func() bool { return ctx.Err() != nil }}); err != nil {
		return false, fault.BadPattern(opts.Pattern, err)
	}
	filter, err := newFilter(opts.Include, opts.Exclude)
	if err != nil {
		return false, err
	}
	root, err := openRoot(opts.Path, abs, opts.Recursive)
	if err != nil {
		return false, err
	}
	defer root.close()
	if root.dir != nil {
		w := walking{ctx: ctx, filter: filter, visit: g.visit}
		err = w.directory(root.dir, "", false, 0)
	} else if _, name := split(abs); filter.file(name, false) {
		err = g.root(root.handle)
	}
	if errors.Is(err, errEnough) {
		return true, nil
	}
	return false, err
}

// errEnough ends a search at MaxMatches.
var errEnough = errors.New("enough matches")

// searchRoot is where a search begins: a directory, or a regular file's handle.
type searchRoot struct {
	handle int
	dir    *directory
}

func openRoot(path, abs string, recursive bool) (*searchRoot, error) {
	handle, st, err := openPath(unix.AT_FDCWD, abs, 0)
	if err != nil {
		return nil, fault.FileErrno(path, err)
	}
	root := &searchRoot{handle: handle}
	switch {
	case !isType(st, unix.S_IFDIR):
		err = requireRegular(path, st)
	case !recursive:
		err = fault.NeedsRecursive(path)
	default:
		root.dir, err = openDir(handle, ".")
		err = fileError(path, err)
	}
	if err != nil {
		closeFD(handle)
		return nil, err
	}
	return root, nil
}

func (r *searchRoot) close() {
	if r.dir != nil {
		r.dir.close()
	}
	closeFD(r.handle)
}

type grepping struct {
	ctx   context.Context //nolint:containedctx // one search
	opts  GrepOptions
	re    *rexp.Regexp
	emit  func(Match) error
	found uint64
	lines lineReader
}

// root searches the file that the search was asked for.
func (g *grepping) root(handle int) error {
	fd, err := reopen(handle, unix.O_RDONLY|unix.O_NONBLOCK)
	if err != nil {
		return fault.FileErrno(g.opts.Path, err)
	}
	f := &file{ctx: g.ctx, fd: fd}
	defer f.close()
	readErr, err := g.file(f, g.opts.Path)
	if err == nil && readErr != nil {
		err = readError(g.ctx, g.opts.Path, readErr)
	}
	return err
}

// visit searches a file of a walk.
func (g *grepping) visit(dir int, name, rel string) error {
	f, _, err := openFile(g.ctx, dir, name)
	if err != nil {
		return nil // gone, special, or not to be read
	}
	defer f.close()
	_, err = g.file(f, join(g.opts.Path, rel))
	if err == nil {
		err = g.ctx.Err()
	}
	return err
}

// file searches f. It returns what ended the reading early, and what ends the
// search.
func (g *grepping) file(f *file, path string) (readErr, err error) {
	lines := &g.lines
	lines.read(f)
	head, err := lines.in.Peek(binaryProbe)
	if bytes.IndexByte(head, 0) >= 0 {
		return nil, nil
	}
	if err != nil && !isEOF(err) && len(head) == 0 {
		return err, nil
	}
	for number := uint64(1); ; number++ {
		l, err := lines.next()
		if isEOF(err) {
			return nil, nil
		}
		if err != nil {
			return err, nil
		}
		if !l.utf8 || !g.match(f, l) {
			continue
		}
		if err := g.ctx.Err(); err != nil {
			return nil, err
		}
		if err := g.report(f, Match{Path: path, Line: number}, l); err != nil {
			return nil, err
		}
		if g.found++; g.opts.MaxMatches > 0 && g.found >= g.opts.MaxMatches {
			return nil, errEnough
		}
	}
}

func (g *grepping) match(f *file, l line) bool {
	if l.text != nil || l.length == 0 {
		return g.re.Match(l.text)
	}
	return g.re.MatchReader(bufio.NewReader(io.NewSectionReader(f, l.offset, l.length)))
}

// report emits the line's content, cut and in pieces.
func (g *grepping) report(f *file, m Match, l line) error {
	length, suffix := l.length, ""
	var content io.Reader = bytes.NewReader(l.text)
	if l.text == nil {
		content = io.NewSectionReader(f, l.offset, l.length)
	}
	if limit := g.opts.MaxLineBytes; limit > 0 && uint64(length) > limit {
		length, suffix = boundary(f, l, int64(limit)), "…"
	}
	content = io.MultiReader(io.LimitReader(content, length), strings.NewReader(suffix))
	length += int64(len(suffix))
	buffer := make([]byte, min(length, MaxPiece))
	for {
		n, err := io.ReadFull(content, buffer[:min(length, MaxPiece)])
		if ctxErr := g.ctx.Err(); ctxErr != nil {
			return ctxErr
		}
		length -= int64(n)
		// A file that was cut meanwhile has no more of the line.
		m.Content, m.Continued = buffer[:n], length > 0 && err == nil
		if err := g.emit(m); err != nil || !m.Continued {
			return err
		}
	}
}

// boundary is the last position up to at where a character of the line begins.
func boundary(f *file, l line, at int64) int64 {
	for ; at > 0; at-- {
		b := make([]byte, 1)
		if l.text != nil {
			b[0] = l.text[at]
		} else if _, err := f.ReadAt(b, l.offset+at); err != nil {
			return at
		}
		if utf8.RuneStart(b[0]) {
			break
		}
	}
	return at
}
