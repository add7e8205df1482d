package app

import (
	"strconv"
)

// File is an application file with every default filled in.
type File struct {
	Applications []*Application `json:"applications"`
}

// Parse reads text (YAML, or JSON, which is YAML) and checks every rule that the file alone can break. The error is a
// Faults with all faults in order of position; the File is then nil. Warnings are about legal but surprising things and
// come with and without faults. file is the name that faults carry. The result does not refer to text.
func Parse(file string, text []byte) (*File, []Warning, error) {
	d := &decoder{file: file, at: map[string]place{}, bad: map[string]bool{}}
	root := d.load(text)
	drafts := d.read(root)
	for _, a := range drafts {
		d.check(a)
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

// read turns the tree into drafts; what has the wrong shape is a fault.
func (d *decoder) read(root *node) []*draft {
	switch {
	case root == nil || root.shape == nullShape:
		if len(d.faults) == 0 {
			d.fault(place{1, 1}, "", Fault{Message: "the file holds nothing", Wanted: "applications: [...]", Hint: "see the sample file"})
		}
		return nil
	case d.isRay(root):
		return nil
	}
	var drafts []*draft
	c := cursor{d, root, ""}
	readFields(c, &drafts, fileFields())
	if root.shape == mapShape && !d.has("applications") {
		c.refuse(Fault{Message: "the key applications is missing or empty", Wanted: "applications: [...]", Hint: "see the sample file"})
	}
	return drafts
}

// isRay finds a Ray Serve file by its import paths and refuses it by name, instead of with a fault for every key.
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
					Message: "this is a Ray Serve file (import_path " + strconv.Quote(e.value.text) + "), which this version does not read",
					Hint:    "reading Ray Serve LLM files comes with the next version; write model, engine and data_parallel as in the sample file",
				})
				found = true
			}
		}
	}
	return found
}
