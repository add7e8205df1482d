package app

import (
	"errors"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
)

// File is an application file with every default filled in.
type File struct {
	Applications []*Application `json:"applications"`
}

// Parse reads text (YAML, or JSON, which is YAML) and checks every rule of a file. The error is a Faults with
// all faults, sorted by position; then the File is nil. Warnings are about legal but surprising values and
// come with and without faults. file is the name in the faults. The result does not refer to text. rules are
// checks of packages that this one does not know; they run on every application.
func Parse(file string, text []byte, rules ...Rule) (*File, []Warning, error) {
	d := &decoder{file: file, at: map[string]place{}, bad: map[string]bool{}}
	root := d.load(text)
	drafts := d.read(root)
	for _, a := range drafts {
		d.check(a)
		d.runRules(a, rules)
	}
	d.checkTogether(drafts)
	if len(d.faults) > 0 {
		return nil, d.warnings, d.faults.sorted()
	}
	out := &File{}
	for _, a := range drafts {
		out.Applications = append(out.Applications, &a.Application)
	}
	return out, d.warnings, nil
}

// Rule checks one application, with its defaults, for another package. path is relative to the application,
// like "routing.params". The message of err becomes the fault, with hint and details if it is a
// *problem.Error.
type Rule func(a *Application) (path string, err error)

func (d *decoder) runRules(a *draft, rules []Rule) {
	for _, rule := range rules {
		path, err := rule(&a.Application)
		path = a.path + "." + path
		if err == nil || !d.isGood(path) {
			continue
		}
		f := Fault{Message: err.Error()}
		var p *problem.Error
		if errors.As(err, &p) {
			f.Hint = p.Hint
			if len(p.Details) > 1 { // a single detail repeats the message
				f.Message += ": " + strings.Join(p.Details, "; ")
			}
		}
		d.broken(path, f)
	}
}

// read converts the tree into drafts. Values of a wrong shape are faults.
func (d *decoder) read(root *node) []*draft {
	switch {
	case root == nil || root.shape == nullShape:
		if len(d.faults) == 0 {
			d.fault(place{1, 1}, "", Fault{Message: "the file holds nothing", Wanted: "applications: [...]",
				Hint: hintSmallest})
		}
		return nil
	case d.isRay(root):
		return nil
	}
	var drafts []*draft
	c := cursor{d, root, ""}
	readFields(c, &drafts, fileFields())
	if root.shape == mapShape && !d.has("applications") {
		c.refuse(Fault{Message: "the key applications is missing or empty", Wanted: "applications: [...]",
			Hint: hintSmallest})
	}
	return drafts
}

// isRay detects a Ray Serve file by its import paths and refuses it by name, instead of with a fault for
// every key.
func (d *decoder) isRay(root *node) bool {
	apps := root.get("applications")
	if apps == nil {
		return false
	}
	found := false
	for i, a := range apps.items {
		for _, e := range a.entries {
			if e.key == "import_path" {
				d.fault(e.place, join(index("applications", i), e.key), Fault{
					Message: "this is a Ray Serve file (import_path " +
						"" + strconv.Quote(e.value.text) + "), which this version does not read",
					Hint: "reading Ray Serve LLM files comes with the next version; write model, engine " +
						"and data_parallel as docs/app-yaml.md shows",
				})
				found = true
			}
		}
	}
	return found
}
