package archtest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Budgets of hand-written code. What is longer has two jobs: split it.
const (
	maxFileLines     = 600
	maxFunctionLines = 90 // outside tests, where a table may be long
)

// readOnlyMark in the comment of a package variable says that it is a table
// that nothing changes.
const readOnlyMark = "read-only"

// A source is one parsed Go file.
type source struct {
	name      string // slash-separated, from the top directory
	fset      *token.FileSet
	ast       *ast.File
	generated bool
}

func (s source) dir() string { return path.Dir(s.name) }
func (s source) test() bool  { return strings.HasSuffix(s.name, "_test.go") }
func (s source) hand() bool  { return !s.generated }
func (s source) main() bool  { return s.ast.Name.Name == "main" }
func (s source) lines() int  { return s.fset.File(s.ast.FileStart).LineCount() }
func (s source) at(p token.Pos) string {
	return fmt.Sprintf("%s:%d", s.name, s.fset.Position(p).Line)
}

func parse(name string, text []byte) (source, error) {
	fset := token.NewFileSet()
	var src any
	if text != nil {
		src = text
	}
	file, err := parser.ParseFile(fset, name, src, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return source{}, err
	}
	return source{name: name, fset: fset, ast: file, generated: ast.IsGenerated(file)}, nil
}

// sources parses every Go file of the tree, whatever its platform or tags.
func sources(t *testing.T) []source {
	t.Helper()
	top := topDir(t)
	var all []source
	err := filepath.WalkDir(top, func(file string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := entry.Name()
		if entry.IsDir() && file != top &&
			(strings.HasPrefix(name, ".") || slices.Contains([]string{"bin", "testdata", "vendor", "node_modules"}, name)) {
			return filepath.SkipDir
		}
		if entry.IsDir() || !strings.HasSuffix(name, ".go") {
			return nil
		}
		s, err := parse(file, nil)
		if err != nil {
			return err
		}
		if s.name, err = filepath.Rel(top, file); err != nil {
			return err
		}
		s.name = filepath.ToSlash(s.name)
		all = append(all, s)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 50 {
		t.Fatalf("only %d Go files found below %s", len(all), top)
	}
	return all
}

func TestEachFile(t *testing.T) {
	t.Parallel()
	for _, s := range sources(t) {
		for _, rule := range fileRules() {
			report(t, rule(s))
		}
	}
}

func fileRules() []func(source) []string {
	return []func(source) []string{size, noInit, noPackageVariables, cgoOnlyInKrun}
}

func size(s source) []string {
	if s.generated {
		return nil
	}
	var faults []string
	if n := s.lines(); n > maxFileLines {
		faults = append(faults, fmt.Sprintf("%s has %d lines, more than %d", s.name, n, maxFileLines))
	}
	for _, decl := range s.ast.Decls {
		fn, ok := decl.(*ast.FuncDecl)
		if !ok || s.test() {
			continue
		}
		if n := s.fset.Position(fn.End()).Line - s.fset.Position(fn.Pos()).Line + 1; n > maxFunctionLines {
			faults = append(faults, fmt.Sprintf("%s: %s has %d lines, more than %d", s.at(fn.Pos()), fn.Name.Name, n, maxFunctionLines))
		}
	}
	return faults
}

func noInit(s source) []string {
	var faults []string
	for _, decl := range s.ast.Decls {
		if fn, ok := decl.(*ast.FuncDecl); ok && s.hand() && fn.Recv == nil && fn.Name.Name == "init" {
			faults = append(faults, s.at(fn.Pos())+": init runs before main can decide anything: call it from there")
		}
	}
	return faults
}

// noPackageVariables allows what does not change: errors, compiled regular
// expressions, embedded files, assertions (var _ I = ...), the version that the
// linker stamps, and tables that say so.
func noPackageVariables(s source) []string {
	if s.test() || s.generated {
		return nil
	}
	var faults []string
	for _, decl := range s.ast.Decls {
		group, ok := decl.(*ast.GenDecl)
		if !ok || group.Tok != token.VAR {
			continue
		}
		for _, spec := range group.Specs {
			value := spec.(*ast.ValueSpec)
			if marked(group.Doc, value.Doc, value.Comment) {
				continue
			}
			for i, name := range value.Names {
				if !constantVariable(s, name.Name, value, i) {
					faults = append(faults, fmt.Sprintf("%s: package variable %s: pass it instead, or where nothing changes it, write %q into its comment",
						s.at(name.Pos()), name.Name, readOnlyMark))
				}
			}
		}
	}
	return faults
}

func constantVariable(s source, name string, value *ast.ValueSpec, i int) bool {
	if name == "_" || s.main() && name == "version" {
		return true
	}
	if i >= len(value.Values) {
		return false
	}
	call, ok := value.Values[i].(*ast.CallExpr)
	if !ok {
		return false
	}
	selector, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	pkg, ok := selector.X.(*ast.Ident)
	if !ok {
		return false
	}
	switch pkg.Name + "." + selector.Sel.Name {
	case "errors.New", "fmt.Errorf":
		return strings.HasPrefix(name, "Err") || strings.HasPrefix(name, "err")
	case "regexp.MustCompile":
		return true
	}
	return false
}

// marked reports whether a comment has readOnlyMark or embeds a file.
func marked(comments ...*ast.CommentGroup) bool {
	for _, group := range comments {
		if group == nil {
			continue
		}
		for _, line := range group.List {
			if strings.HasPrefix(line.Text, "//go:embed ") {
				return true
			}
		}
		if strings.Contains(strings.ToLower(group.Text()), readOnlyMark) {
			return true
		}
	}
	return false
}

func cgoOnlyInKrun(s source) []string {
	if s.dir() == "internal/krun" {
		return nil
	}
	for _, imported := range s.ast.Imports {
		if imported.Path.Value == `"C"` {
			return []string{s.at(imported.Pos()) + ": cgo is for internal/krun alone"}
		}
	}
	return nil
}

func TestEachPackage(t *testing.T) {
	t.Parallel()
	byDir := map[string][]source{}
	for _, s := range sources(t) {
		byDir[s.dir()] = append(byDir[s.dir()], s)
	}
	std := standardNames(t)
	for dir, files := range byDir {
		report(t, onePackageComment(dir, files))
		report(t, goodName(dir, files, std))
	}
}

func onePackageComment(dir string, files []source) []string {
	var with []string
	code := false
	for _, s := range files {
		if s.test() {
			if s.ast.Doc != nil {
				with = append(with, s.name)
			}
			continue
		}
		code = true
		if s.ast.Doc != nil && s.hand() {
			with = append(with, s.name)
			want := "Package " + s.ast.Name.Name + " "
			if s.main() {
				want = "Command " + path.Base(dir) + " "
			}
			if text := s.ast.Doc.Text(); !strings.HasPrefix(text, want) {
				return []string{fmt.Sprintf("%s: the package comment begins %.30q, not %q", s.name, text, want)}
			}
		}
	}
	generated := !slices.ContainsFunc(files, source.hand)
	switch {
	case !code:
		return []string{fmt.Sprintf("%s holds only tests: give it a doc.go that says what they are for", dir)}
	case len(with) > 1:
		return []string{fmt.Sprintf("%s has more than one package comment: %v", dir, with)}
	case len(with) == 0 && !generated:
		return []string{fmt.Sprintf("%s has no package comment", dir)}
	}
	return nil
}

// goodName refuses names that say nothing and names that hide a package of the
// standard library.
func goodName(dir string, files []source, std map[string]bool) []string {
	var faults []string
	grabBags := []string{"util", "utils", "common", "helper", "helpers", "misc", "type", "types", "model", "models", "base", "core", "manager"}
	for _, s := range files {
		name := strings.TrimSuffix(s.ast.Name.Name, "_test")
		if slices.Contains(grabBags, name) {
			faults = append(faults, fmt.Sprintf("%s: a package called %s holds anything: name it for what it does", s.name, name))
		}
		if std[name] {
			faults = append(faults, fmt.Sprintf("%s: package %s is called like one of the standard library", s.name, name))
		}
		file := strings.TrimSuffix(strings.TrimSuffix(path.Base(s.name), ".go"), "_test")
		if slices.Contains(grabBags, file) {
			faults = append(faults, fmt.Sprintf("%s: name the file for what is in it", s.name))
		}
		if name != "main" && name != path.Base(dir) && s.hand() {
			faults = append(faults, fmt.Sprintf("%s: package %s is in a directory of another name", s.name, name))
		}
	}
	return faults
}

// standardNames are the names of the packages of the standard library.
func standardNames(t *testing.T) map[string]bool {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "list", "std").Output()
	if err != nil {
		t.Fatalf("go list std: %v", err)
	}
	names := map[string]bool{}
	for importPath := range strings.FieldsSeq(string(out)) {
		// Names of vendored and internal packages are nobody's.
		if !strings.Contains("/"+importPath+"/", "/internal/") && !strings.HasPrefix(importPath, "vendor/") {
			names[path.Base(importPath)] = true
		}
	}
	return names
}
