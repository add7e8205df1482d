package app

import (
	"cmp"
	"errors"
	"reflect"
	"slices"
	"strings"

	yaml "github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/token"
)

// File is an application file with every default filled in. An application with prefill and decode ranks is
// two: its prefill pool, then its decode pool.
type File struct {
	Applications []*Application `json:"applications"`
	// Foreign is the tool for which the text was written, "" if it is dpserve's own form
	Foreign string `json:"-"`
}

// Foreign says how a file is read that was written for another tool.
type Foreign struct {
	// Beside reads a file that the file names, by its path from there; nil: no other file can be read
	Beside func(path string) ([]byte, error)
	// RayReplicas is what num_replicas of Ray Serve counts where data_parallel_size is set: RayGroups,
	// RayRanks, or "": groups, or one group if both numbers are equal
	RayReplicas string
}

// Values of RayReplicas.
const (
	RayGroups = "groups"
	RayRanks  = "ranks"
)

// Parse reads text (YAML, or JSON, which is YAML) and checks every rule of a file. The error is a Faults with
// all faults, sorted by position; then the File is nil. Warnings are about legal but surprising values and
// come with and without faults. base has the defaults, file is the name in the faults. The result does not
// refer to text. Parse also reads files that were written for Ray Serve LLM; those that name files of models
// need ParseWith.
func Parse(base Application, file string, text []byte) (*File, []Warning, error) {
	return ParseWith(base, file, text, Foreign{})
}

// ParseWith is Parse that reads a file of another tool as foreign says.
func ParseWith(base Application, file string, text []byte, foreign Foreign) (*File, []Warning, error) {
	d := newDecoder(file)
	d.base, d.foreign = base, foreign
	root := d.load(text)
	var drafts []*draft
	for _, a := range d.read(root) {
		pools := splitter{a}.split()
		for _, p := range pools {
			p.check()
		}
		if len(pools) > 1 {
			checkPair(pools[0], pools[1])
		}
		drafts = append(drafts, pools...)
	}
	by := claims{taken{}, taken{}, taken{}}
	for _, a := range drafts {
		a.claim(by)
	}
	if len(d.faults) > 0 {
		return nil, d.warnings, d.faults.sorted()
	}
	out := &File{Foreign: d.tool}
	for _, a := range drafts {
		checked := a.Application // a copy, so that the draft and the decoder can go
		out.Applications = append(out.Applications, &checked)
	}
	return out, d.warnings, nil
}

// read converts the tree into drafts. Values of a wrong shape are faults.
func (d *decoder) read(root *node) []*draft {
	switch {
	case root == nil || root.shape == nullShape:
		if len(d.faults) == 0 {
			d.fault(place{line: 1, col: 1}, "", Fault{
				Message: "the file holds nothing", Wanted: "applications: [...]", Hint: hintSmallest,
			})
		}
		return nil
	case d.refuseForeign(root):
		return nil
	case isRay(root):
		if root = d.convertRay(root); len(d.faults) > 0 {
			return nil
		}
	}
	var top struct {
		Applications []*draft `json:"applications"`
	}
	root.entries = slices.DeleteFunc(root.entries, func(e entry) bool {
		return strings.HasPrefix(e.key, "x-") // the user's own, a place for anchors, as in a Compose file
	})
	c := cursor{d, root, ""}
	c.readStruct(reflect.ValueOf(&top).Elem())
	if root.shape == mapShape && !d.has("applications") {
		c.refuse(Fault{
			Message: "the key applications is missing or empty", Wanted: "applications: [...]",
			Hint: hintSmallest,
		})
	}
	return top.Applications
}

// load parses text into a node; nil if the text has no value or is not YAML.
func (d *decoder) load(text []byte) *node {
	if what, at := checkText(text); what != "" {
		d.fault(at, "", Fault{Message: what, Hint: "write a plain UTF-8 YAML or JSON file"})
		return nil
	}
	tokens := lexer.Tokenize(string(text))
	if what, at := checkTokens(tokens); what != "" {
		d.fault(at, "", Fault{Message: what, Hint: "split the file into several smaller ones"})
		return nil
	}
	body := d.body(tokens, text)
	if body == nil {
		return nil
	}
	b := &builder{d: d, anchors: map[string]*node{}}
	return b.node(body)
}

// body returns the one document of the file, nil if there is none.
func (d *decoder) body(tokens token.Tokens, text []byte) ast.Node {
	file, err := parseTokens(tokens)
	if err != nil {
		at, what := place{line: 1, col: 1}, err.Error()
		if syntax, ok := errors.AsType[*yaml.SyntaxError](err); ok {
			at, what = placeOfToken(syntax.Token), syntax.Message
		}
		fault := Fault{Message: "not YAML: " + what, Hint: "correct the syntax at this place"}
		if tab, ok := tabNear(text, at.line); ok || strings.Contains(what, "tab character") {
			if ok {
				at = tab
			}
			fault = Fault{Message: "YAML takes no tabs", Hint: "indent with spaces"}
		}
		d.fault(at, "", fault)
		return nil
	}
	var found ast.Node
	for _, doc := range file.Docs {
		if _, directive := doc.Body.(*ast.DirectiveNode); doc.Body == nil || directive {
			continue
		}
		if found != nil {
			d.fault(placeOf(doc.Body), "", Fault{
				Message: "a second document (---)",
				Hint:    "put all applications into one list",
			})
			return found
		}
		found = doc.Body
	}
	return found
}

// tabNear finds the tab in the indentation of a line, or of the ones beside it: the parser reports what it
// did not understand at one of them.
func tabNear(text []byte, line int) (place, bool) {
	lines := strings.Split(string(text), "\n")
	for _, n := range []int{line, line - 1, line + 1} {
		if n < 1 || n > len(lines) {
			continue
		}
		content := strings.TrimLeft(lines[n-1], " ")
		if strings.HasPrefix(content, "\t") && strings.TrimSpace(content) != "" {
			return place{line: n, col: len(lines[n-1]) - len(content) + 1}, true
		}
	}
	return place{}, false
}

// decoder collects the results of Parse: faults, warnings, and the position of each path.
type decoder struct {
	file     string
	base     Application // the defaults
	known    map[reflect.Type][]key
	faults   Faults
	warnings []Warning
	warned   map[Warning]bool
	at       map[string]place // path → position of its value
	bad      map[string]bool  // paths that have a fault, so that no rule adds a second one
	// a pool's own values are being read over those of its application, so none of them is required
	isOverlay bool

	foreign Foreign
	tool    string            // File.Foreign
	origins map[string]string // of a converted file: path here → path in the file
}

func newDecoder(file string) *decoder {
	return &decoder{
		file: file, known: map[reflect.Type][]key{}, at: map[string]place{}, bad: map[string]bool{},
		warned: map[Warning]bool{},
	}
}

func (d *decoder) keys(t reflect.Type) []key {
	if _, ok := d.known[t]; !ok {
		d.known[t] = keysOf(t)
	}
	return d.known[t]
}

// fault records f at a position. path may be empty.
func (d *decoder) fault(at place, path string, f Fault) {
	f.File, f.Line, f.Col, f.Path = cmp.Or(at.file, d.file), at.line, at.col, d.pathInFile(path)
	d.faults = append(d.faults, f)
	if path != "" {
		d.bad[path] = true
	}
}

// need records a fault if a key is missing. It records none if a fault at a parent explains the absence.
func (d *decoder) need(around, key, hint string) {
	if path := join(around, key); !d.has(path) && d.isGood(path) {
		d.wrong(path, "the key "+key+" is missing or empty", hint)
	}
}

// wrong records a broken rule at path, like broken.
func (d *decoder) wrong(path, message, hint string) {
	d.broken(path, Fault{Message: message, Hint: hint})
}

// unlike records a value at path that is not what is wanted, like broken.
func (d *decoder) unlike(path, found, wanted, hint string) {
	d.broken(path, Fault{Found: found, Wanted: wanted, Hint: hint})
}

// broken records a fault of a rule at path. If path was not written, the fault is at the nearest written
// parent.
func (d *decoder) broken(path string, f Fault) { d.fault(d.where(path), path, f) }

func (d *decoder) warn(path, message, hint string) {
	d.warnAt(d.where(path), d.pathInFile(path), message, hint)
}

func (d *decoder) warnAt(at place, path, message, hint string) {
	w := Warning{
		File: cmp.Or(at.file, d.file), Line: at.line, Col: at.col, Path: path, Message: message, Hint: hint,
	}
	if !d.warned[w] { // both pools find what their application says
		d.warned[w] = true
		d.warnings = append(d.warnings, w)
	}
}

func (d *decoder) where(path string) place {
	for p := path; p != ""; p = parentOf(p) {
		if at, ok := d.at[p]; ok {
			return at
		}
	}
	return place{line: 1, col: 1}
}

// parentOf removes the last key or index from a path.
func parentOf(path string) string { return path[:max(0, strings.LastIndexAny(path, ".["))] }

// pathInFile returns the path in the file of a path of ours. They differ if the file was converted.
func (d *decoder) pathInFile(path string) string {
	for p := path; p != ""; p = parentOf(p) {
		if was, ok := d.origins[p]; ok && strings.Contains(p, ".") {
			return was + path[len(p):]
		} else if ok { // what the file does not have, an application of ours makes of its parts
			return was
		}
	}
	return path
}

// isSound reports whether path was written, without a fault.
func (d *decoder) isSound(path string) bool { return d.has(path) && d.isGood(path) }

// has reports whether path was written. An empty value does not count.
func (d *decoder) has(path string) bool {
	_, ok := d.at[path]
	return ok
}

// isGood reports that no fault is known at the paths or at their parents.
func (d *decoder) isGood(paths ...string) bool {
	for _, path := range paths {
		for p := path; p != ""; p = parentOf(p) {
			if d.bad[p] {
				return false
			}
		}
	}
	return true
}
