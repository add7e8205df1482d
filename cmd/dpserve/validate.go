package main

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/server"
)

// validateDocument is the JSON of validate. Messages of faults say all of a fault: rule, found and wanted.
type validateDocument struct {
	APIVersion   string         `json:"apiVersion"`
	File         string         `json:"file"`
	Valid        bool           `json:"valid"` // there are no faults
	Applications []validatedApp `json:"applications"`
	Faults       []client.Fault `json:"faults"`
	Warnings     []client.Fault `json:"warnings"`
}

type validatedApp struct {
	Name   string `json:"name"`
	Kind   string `json:"kind"`
	Starts bool   `json:"starts"` // this version can start its engines
}

func newValidate(e *env) *cobra.Command {
	var show bool
	var output *format
	cmd := &cobra.Command{
		Use:   "validate FILE [flags]",
		Short: "check an app.yaml, offline",
		Long: `validate reads a file as deploy does and names every fault with line, column, what was found
and what was wanted. It needs no running dpserve. FILE may be - for stdin. Faults end it with exit code 2.

-o json prints one document, with faults or without: file, valid, applications (name, kind, starts: whether
this version can start its engines), faults and warnings (file, line, col, path, message, found, wanted,
hint).`,
		Example: `  dpserve validate examples/quickstart/app.yaml --print
  dpserve validate app.yaml -o json            # for editors and CI`,
		Args: requireArgs(1, "FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if show && cmd.Flags().Changed("output") {
				return usageError("validate", "--print and --output exclude each other")
			}
			return runValidate(e, args[0], show, *output)
		},
	}
	cmd.Flags().BoolVar(&show, "print", false,
		"print the file as dpserve reads it, sizes worked out, without what is at its default")
	output = addOutput(cmd)
	return cmd
}

func runValidate(e *env, path string, show bool, output format) error {
	if output == formatJSON || output == formatYAML {
		return writeValidation(e, path, output)
	}
	file, err := readApps(e, path)
	if err != nil {
		return err
	}
	switch {
	case show:
		_, err = e.io.Out.Write(file.print())
		return err
	case output == formatName:
		return writeNames(e.io.Out, file.names())
	}
	for _, a := range eachOnce(file.apps) {
		var cannot *problem.Error
		if errors.As(checkKinds([]*app.Application{a}), &cannot) {
			printMessage(e.io.Err, "warning: %s; hint: %s", cannot.Message, cannot.Hint)
		}
	}
	printMessage(e.io.Err, "%s is sound: %s", file.name, formatCount(len(file.names()), "application"))
	return nil
}

// writeValidation prints the document. Faults are part of it, so only the exit code tells of them again.
func writeValidation(e *env, path string, output format) error {
	text, err := readFile(e, path)
	if err != nil {
		return err
	}
	file, warnings, err := server.ParseApps(path, text)
	var faults app.Faults
	if err != nil && !errors.As(err, &faults) {
		return err
	}
	doc := validateDocument{
		APIVersion: apiVersion, File: path, Valid: err == nil, Applications: []validatedApp{},
		Faults:   append([]client.Fault{}, completeFaults(convertFaults(faults))...),
		Warnings: append([]client.Fault{}, completeFaults(convertFaults(warnings))...),
	}
	if file != nil && doc.Valid {
		for _, a := range eachOnce(file.Applications) {
			doc.Applications = append(doc.Applications,
				validatedApp{a.AppName(), string(a.Engine.Kind), a.Engine.Kind.Runs()})
		}
	}
	if output == formatYAML {
		err = writeYAML(e.io.Out, doc)
	} else {
		err = writeJSON(e.io.Out, doc)
	}
	if err != nil || doc.Valid {
		return err
	}
	return &silentError{code: problem.ExitCode(problem.InvalidArgument)}
}
