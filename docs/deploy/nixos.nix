# A NixOS module: fedsender in place of a worker of services.matrix-synapse.
#
#   imports = [ ./nixos.nix ];
#   services.matrix-synapse.workers = { };     # without the federation sender's
#   services.matrix-synapse.settings.federation_sender_instances = [ "fed1" ];
#   # Redis must run. Where no other worker is left, Synapse's module has neither the replication
#   # listener nor an instance_map any more: set both, in `settings`, if fedsender has `feed.http`.
#   services.matrix-synapse.configureRedisLocally = true;
#   services.fedsender = {
#     enable = true;
#     package = ...;                           # the sources, by buildPythonApplication
#     settings = { ... };                      # what `fedsender config from-synapse` prints
#   };
{ config, lib, pkgs, ... }:
let
  cfg = config.services.fedsender;
  command = lib.getExe' cfg.package "fedsender";
  file = (pkgs.formats.yaml { }).generate "fedsender.yaml" cfg.settings;
  # The limits in the unit follow from the settings, so fedsender prints it.
  unit = pkgs.runCommand "fedsender-unit" { } ''
    mkdir -p $out/lib/systemd/system
    ${command} systemd-unit -c ${file} --user ${cfg.user} --executable ${command} \
      > $out/lib/systemd/system/fedsender.service
  '';
in
{
  options.services.fedsender = {
    enable = lib.mkEnableOption "fedsender, a federation sender for Matrix homeservers";
    package = lib.mkOption {
      type = lib.types.package;
      description = "The package with bin/fedsender.";
    };
    user = lib.mkOption {
      type = lib.types.str;
      default = "matrix-synapse";
      description = "Reads the signing key and the secrets; the database knows it.";
    };
    settings = lib.mkOption {
      type = (pkgs.formats.yaml { }).type;
      description = ''
        The configuration. It is readable by all users, so let secrets be files
        (admin.token_file, ...), which it only names.
      '';
    };
  };

  config = lib.mkIf cfg.enable {
    environment.systemPackages = [ cfg.package ];
    environment.variables.FEDSENDER_CONFIG = "${file}";
    systemd.packages = [ unit ];
    systemd.services.fedsender.wantedBy = [ "multi-user.target" ];
  };
}
