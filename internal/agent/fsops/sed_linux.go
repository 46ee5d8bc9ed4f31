package fsops

import (
	"bufio"
	"context"
	"errors"
	"io"
	"path/filepath"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent/rexp"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// SedOptions is a replacement in files.
type SedOptions struct {
	// Files are rewritten in this order; Path is walked as Grep walks. Exactly
	// one of them is given.
	Files []string
	Path  *string
	// Pattern and Replacement are in Rust's syntax, or plain text with Literal.
	Pattern, Replacement string
	Literal              bool
	// FirstOnly replaces only the first match of each line.
	FirstOnly  bool
	IgnoreCase bool
	// These count with Path alone.
	Recursive        bool
	Include, Exclude []string
}

// SedResult is what became of one file.
type SedResult struct {
	Path         string
	Replacements uint64
	// Err tells why the file is as it was.
	Err error
}

// maxSedLine is the longest line that sed replaces in: it is held in memory.
const maxSedLine = 8 << 20

// Sed replaces line by line, the line's end being part of the line, and calls
// emit with a result for each file; its error ends the operation. A file is
// rewritten in one step and only where something matched; mode, owner and
// attributes stay, a link in Files becomes a file. Files that are not UTF-8 or
// have a line of more than 8 MiB fail.
func Sed(ctx context.Context, opts SedOptions, emit func(SedResult) error) error {
	if (len(opts.Files) > 0) == (opts.Path != nil) {
		return fault.SedTargets()
	}
	s := sedding{ctx: ctx, first: opts.FirstOnly, emit: emit, in: bufio.NewReaderSize(nil, readBuffer)}
	if opts.Path == nil {
		if err := s.compile(opts); err != nil {
			return err
		}
		return s.list(opts.Files)
	}
	path := *opts.Path
	abs, err := resolve(path)
	if err != nil {
		return err
	}
	root, err := openRoot(path, abs, opts.Recursive)
	if err != nil {
		return err
	}
	defer root.close()
	filter, err := newFilter(opts.Include, opts.Exclude)
	if err != nil {
		return err
	}
	if err := s.compile(opts); err != nil {
		return err
	}
	if st, err := statAt(unix.AT_FDCWD, abs, unix.AT_SYMLINK_NOFOLLOW); err == nil && isType(st, unix.S_IFLNK) {
		if path, err = filepath.EvalSymlinks(abs); err != nil {
			return fault.FileErrno(*opts.Path, err)
		}
	}
	if root.dir == nil {
		if _, name := split(path); !filter.file(name, false) {
			return nil
		}
		return s.list([]string{path})
	}
	w := walking{ctx: ctx, filter: filter, visit: func(dir int, name, rel string) error {
		return s.visit(dir, name, join(path, rel))
	}}
	return w.directory(root.dir, "", false, 0)
}

type sedding struct {
	ctx      context.Context //nolint:containedctx // one call of Sed
	re       *rexp.Regexp
	template *rexp.Template
	first    bool
	emit     func(SedResult) error
	// in is used for one file after the other.
	in *bufio.Reader
}

func (s *sedding) compile(opts SedOptions) (err error) {
	if opts.Literal && opts.Pattern == "" {
		return fault.EmptyPattern()
	}
	s.re, err = rexp.Compile(opts.Pattern, rexp.Options{
		Literal: opts.Literal, IgnoreCase: opts.IgnoreCase, Ended: func() bool { return s.ctx.Err() != nil },
	})
	if err != nil {
		return fault.BadPattern(opts.Pattern, err)
	}
	if s.template = rexp.LiteralTemplate(opts.Replacement); !opts.Literal {
		s.template = s.re.Template(opts.Replacement)
	}
	return nil
}

// list rewrites files by their paths, following links to read them.
func (s *sedding) list(files []string) error {
	for _, path := range files {
		n, err := s.named(path)
		if err := s.result(path, n, err); err != nil {
			return err
		}
	}
	return nil
}

func (s *sedding) named(path string) (uint64, error) {
	abs, err := resolve(path)
	if err != nil {
		return 0, err
	}
	r, err := Open(s.ctx, path)
	if err != nil {
		return 0, err
	}
	defer r.Close()
	dir, name := split(abs)
	if isDots(name) {
		return 0, fault.WrongType(path, "is a directory")
	}
	handle, _, err := openPath(unix.AT_FDCWD, dir, unix.O_DIRECTORY)
	if err != nil {
		return 0, fault.FileErrno(path, err)
	}
	defer closeFD(handle)
	return s.rewrite(&r.file, handle, name)
}

// visit rewrites a file of a walk. One that has vanished has no result.
func (s *sedding) visit(dir int, name, path string) error {
	f, _, err := openFile(s.ctx, dir, name)
	if errors.Is(err, errSkip) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ELOOP) {
		return nil
	}
	if err != nil {
		return s.result(path, 0, err)
	}
	defer f.close()
	n, err := s.rewrite(f, dir, name)
	return s.result(path, n, err)
}

func (s *sedding) result(path string, n uint64, err error) error {
	if ctxErr := s.ctx.Err(); ctxErr != nil && errors.Is(err, ctxErr) {
		return ctxErr
	}
	if err != nil {
		return s.emit(SedResult{Path: path, Err: fault.FileErrno(path, err)})
	}
	return s.emit(SedResult{Path: path, Replacements: n})
}

// rewrite replaces in f, which is name in dir.
func (s *sedding) rewrite(f *file, dir int, name string) (uint64, error) {
	matches := false
	err := s.eachLine(f, func(line []byte) error {
		matches = matches || s.re.Match(line)
		return nil
	})
	if err != nil || !matches {
		return 0, err
	}
	if _, err := unix.Seek(f.fd, 0, unix.SEEK_SET); err != nil {
		return 0, err
	}
	d, err := newDraft(dir)
	if err != nil {
		return 0, err
	}
	defer d.discard()
	out := bufio.NewWriterSize(d, 64<<10)
	total := uint64(0)
	err = s.eachLine(f, func(line []byte) error {
		n, err := s.re.Replace(out, line, s.template, s.first)
		total += uint64(n)
		return err
	})
	if err == nil {
		err = out.Flush()
	}
	if err == nil {
		err = likeOriginal(f.fd, d.fd)
	}
	if err == nil {
		err = s.ctx.Err()
	}
	if err == nil {
		err = d.commit(name)
	}
	if err != nil {
		return 0, err
	}
	return total, nil
}

// likeOriginal gives the rewritten file the owner, attributes and mode of the
// original. Capabilities are not among them: the program is another.
func likeOriginal(from, to int) error {
	var st unix.Stat_t
	if err := unix.Fstat(from, &st); err != nil {
		return err
	}
	if err := unix.Fchown(to, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	err := copyXattrs(from, func(name string, value []byte) error {
		if name == "security.capability" {
			return nil
		}
		return unix.Fsetxattr(to, name, value, 0)
	})
	if err != nil {
		return err
	}
	return unix.Fchmod(to, st.Mode&0o7777)
}

// Why a file is not rewritten.
var (
	errNotUTF8  = errors.New("is not valid UTF-8")
	errLongLine = errors.New("has a line of more than 8 MiB")
)

// eachLine calls f with every line, its end included, up to the first error.
func (s *sedding) eachLine(r io.Reader, f func([]byte) error) error {
	in := s.in
	in.Reset(r)
	var held []byte
	for {
		line, err := in.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			held = held[:0]
			for errors.Is(err, bufio.ErrBufferFull) {
				if held = append(held, line...); len(held) > maxSedLine {
					return errLongLine
				}
				line, err = in.ReadSlice('\n')
			}
			held = append(held, line...)
			line = held
		}
		if err != nil && !isEOF(err) {
			return err
		}
		if len(line) > 0 {
			if !utf8.Valid(line) {
				return errNotUTF8
			}
			if err := f(line); err != nil {
				return err
			}
		}
		if err != nil {
			return nil //nolint:nilerr // the end of the file
		}
	}
}
